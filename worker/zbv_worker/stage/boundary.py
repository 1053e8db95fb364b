"""The two boundaries of a stage: values enter and leave it detached, so graphs of two stages never join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import arrived, is_dtensor
from zbv_worker.values.structure import FLOATS, is_plain, map_tensors, tensors_of

Gradient = Tensor | tuple[Tensor, ...]
"""Of a value that is one floating tensor, one tensor; otherwise one per tensor that requires a gradient."""


Written = Sequence[tuple[Tensor, int]]
"""Tensors, and their versions before layers could write to them."""


def enter(value: Any, *, is_data: bool) -> tuple[Any, list[Tensor]]:
    """Detach a value, in new containers; returns it and those of its tensors that require a gradient.

    No layer can write to the latter in place, because they are leaves: see :func:`enter_to_write`.

    Parameters
    ----------
    is_data
        Whether it is the first stage's input, which needs a gradient only if the user's tensor requires one.
    """
    if isinstance(value, Tensor):
        x = value.detach()
        if not (value.requires_grad or (x.dtype in FLOATS and not is_data)):
            return x, []
        return x, [x.requires_grad_()]
    leaves: list[Tensor] = []

    def detached(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf

    return map_tensors(detached, value), leaves


def enter_to_write(value: Any, *, is_data: bool) -> tuple[Any, list[Tensor], Written]:
    """:func:`enter` for layers that may write to their input; also returns what :func:`note_writes` needs.

    Data are copied, because they belong to the user. Other tensors keep their memory, but are not leaves, and
    no views of leaves: autograd forbids writing to both. They keep their version too. So if the stage before
    has saved that memory for its backward, autograd raises an error there, as it does within one graph.
    """
    x, leaves = enter(value, is_data=is_data)
    x = map_tensors(Tensor.clone if is_data else _writable, x)
    return x, leaves, [(tensor, _version(tensor)) for tensor in tensors_of(x)]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those of the inference mode have none


def _writable(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    other = tensor.detach()
    with _unsafe_preserve_version_counter(other):
        _Writable.apply(other, tensor)  # type: ignore[no-untyped-call]  # torch's own
    return other


class _Writable(torch.autograd.Function):
    """Makes a tensor the output of an operator whose gradient is that of a leaf; computes nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def note_writes(written: Written, output: Any, *, is_data: bool) -> bool:
    """Whether layers wrote to what :func:`enter_to_write` returned, or pass data on to be written to.

    Raises :class:`ModelError` if they wrote to memory that the input has in several places, whose gradients
    would miss the write.
    """
    if is_data and any(_shares(tensor, data) for tensor in tensors_of(output) for data, _ in written):
        return True
    changed = [tensor for tensor, version in written if _version(tensor) != version]
    for tensor in [] if is_data else changed:
        if sum(_shares(tensor, other) for other, _ in written) > 1:
            raise ModelError(
                f"found a layer that writes to its input, a tensor {list(tensor.shape)} that the layer "
                f"before has returned in several places. Return a copy in one of them (tensor.clone())."
            )
    return bool(changed)


def _shares(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have memory of one allocation."""
    found: bool = torch._C._is_alias_of(tensor, other)  # type: ignore[attr-defined]
    return found


def leave(output: Any) -> tuple[Any, list[GradientEdge]]:
    """Detach a stage's output; returns it, and where its gradients enter the graph.

    Tensors of the returned value require a gradient where one must come back (but see :data:`Gradient`). The
    graph is held by its edges, not by the output: its values are not needed after they were sent, unless the
    graph itself saved them.
    """
    if isinstance(output, Tensor):
        edges = [get_gradient_edge(output)] if output.requires_grad else []
        if type(output) is Tensor and output.dtype in FLOATS:  # the usual case; every F comes here
            return output.detach(), edges
        x = _local(output.detach())
        return (x if is_plain(x) else x.requires_grad_(bool(edges))), edges
    edges = []

    def detached(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            edges.append(get_gradient_edge(tensor))
        return _local(tensor.detach()).requires_grad_(tensor.requires_grad)

    return map_tensors(detached, output), edges


def _local(tensor: Tensor) -> Tensor:
    """A tensor that can be sent; raises :class:`ModelError` for a DTensor."""
    if is_dtensor(tensor):
        raise ModelError(
            "a stage returned a DTensor; stages pass on local tensors. Keep use_local_output=True in the "
            "last module of a layer, or return output.to_local()."
        )
    return arrived(tensor)


def as_list(gradient: Gradient | None) -> Sequence[Tensor]:
    """The gradients one by one."""
    if gradient is None:
        return ()
    return (gradient,) if isinstance(gradient, Tensor) else gradient


def take_gradient(leaves: Sequence[Tensor], *, is_single: bool) -> Gradient:
    """The gradients that a backward left at the tensors of an input; zeros where it left none."""
    taken = []
    for leaf in leaves:
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        taken.append(gradient if type(gradient) is Tensor else arrived(gradient))
    return taken[0] if is_single else tuple(taken)


def marked_without_graph(output: Any, input: Any) -> Any:
    """The output of a layer that ran without a graph, with marks on the tensors that may need a gradient.

    These are all floating tensors, except those that the layer returned unchanged from its input: they keep
    their mark.
    """
    if isinstance(output, Tensor) and is_plain(output):
        # A view of a leaf requires a gradient and has no graph.
        return output.detach() if output.requires_grad else output
    before = {id(tensor): tensor.requires_grad for tensor in tensors_of(input)}

    def marked(tensor: Tensor) -> Tensor:
        flag = before.get(id(tensor), tensor.is_floating_point() or tensor.is_complex())
        return tensor.detach().requires_grad_(flag)

    return map_tensors(marked, output)
