"""The two boundaries of a stage: values enter and leave it detached, so graphs of two stages never join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.errors import ModelError
from zbv_worker.stage.dtensors import arrived, is_dtensor
from zbv_worker.values.structure import FLOATS, is_plain, map_tensors, tensors_of

Gradient = Tensor | tuple[Tensor, ...]
"""Of a value that is one floating tensor, one tensor; otherwise one per tensor that requires a gradient."""


def enter(value: Any, *, is_data: bool) -> tuple[Any, list[Tensor]]:
    """Detach a value, in new containers; returns it and those of its tensors that require a gradient.

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
    if is_single:
        return _taken(leaves[0])
    return tuple(map(_taken, leaves))


def _taken(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else arrived(gradient)


def marked_without_graph(output: Any, input: Any) -> Any:
    """The output of a layer that ran without a graph, with marks on the tensors that may need a gradient.

    These are all floating tensors, except those that the layer returned unchanged from its input: they keep
    their mark.
    """
    if isinstance(output, Tensor) and is_plain(output):
        return output
    before = {id(tensor): tensor.requires_grad for tensor in tensors_of(input)}

    def marked(tensor: Tensor) -> Tensor:
        flag = before.get(id(tensor), tensor.is_floating_point() or tensor.is_complex())
        return tensor.detach().requires_grad_(flag)

    return map_tensors(marked, output)
