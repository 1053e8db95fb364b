"""Activation checkpointing that keeps the backward split (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

F runs every segment of a stage without a graph and keeps the segment's input. The backward visits the
segments from last to first: it runs a segment again, with a graph, and propagates through it at once, so that
only one segment's activations exist at a time. I adds weight gradients to the queue, for W.

torch.utils.checkpoint would work with I and W too. But it keeps a graph and a random state per segment
between F and I, and it cannot make the loss part of the last segment without the stage's help.

Buffers that a module's forward updates, such as running statistics, are updated once, by F. Other side
effects happen twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import string_at
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase

from zbv_worker.errors import ModelError
from zbv_worker.stage.boundary import Gradient, as_list, enter, marked_without_graph, take_gradient
from zbv_worker.stage.kept import Kept
from zbv_worker.stage.layers import call
from zbv_worker.stage.loss import AuxiliaryLosses, Running
from zbv_worker.stage.weight_grads import has_hooks
from zbv_worker.values.structure import device_of, is_plain, map_tensors, tensors_of

Segment = Callable[[Any], Any]
"""A layer, a whole stage, or the last of either with the loss: maps one value to one."""

Computing = Callable[[Any], AbstractContextManager[object]]
"""The context of an input's forward (autocast)."""

Seed = Callable[[Tensor], Tensor]
"""The initial gradient of an output, if the backward receives none."""

CheckGraph = Callable[[Iterable[Tensor], Sequence[Tensor]], None]
"""Takes the tensors that a graph computes, and those that it begins at; may raise an error."""


class _Kept(NamedTuple):
    """The state that F keeps of a segment."""

    segment: Segment
    input: Any
    versions: tuple[int, ...]
    """Those of the input's tensors."""
    random: tuple[Tensor, ...] | None
    """None if it drew no random numbers."""
    flags: tuple[bool, ...]
    """For each tensor of its output, whether its gradient comes back."""


class Recomputed:
    """The segments of one stage and microbatch between F and the backward.

    Parameters
    ----------
    computing
        The context of every forward, first or repeated.
    seed
        Given if the last segment ends in the loss.
    auxiliary
        The auxiliary losses of the stage.
    check
        Called for the graph of each segment.
    """

    def __init__(
        self,
        computing: Computing,
        seed: Seed | None,
        auxiliary: AuxiliaryLosses,
        check: CheckGraph | None = None,
    ):
        self._computing = computing
        self._seed = seed
        self._auxiliary = auxiliary
        self._check = check
        self._updated: list[nn.Module] = []
        self._kept: list[_Kept] = []

    def forward(self, segments: Sequence[Segment], x: Any, modules: Iterable[nn.Module] = ()) -> Any:
        """Run F; returns the last segment's output, without a graph.

        Its tensors require a gradient where one may come back
        (:func:`~zbv_worker.stage.boundary.marked_without_graph`).

        Parameters
        ----------
        modules
            Those that may update their buffers.
        """
        generators = default_generators(device_of(x))
        buffers = [(module, _states_of_buffers(module)) for module in modules if module._buffers]
        with torch.no_grad(), self._computing(x):
            for segment in segments:
                before = _states(generators)
                # A layer may write to the containers of its input, so it gets others.
                given = x if isinstance(x, Tensor) else map_tensors(lambda tensor: tensor, x)
                output = segment(given)
                drew = _differ(before, _states(generators))
                output = marked_without_graph(output, x)
                self._kept.append(_Kept(segment, x, _versions(x), before if drew else None, _flags(output)))
                x = output
        self._updated = [module for module, state in buffers if _states_of_buffers(module) != state]
        return x

    def hold_inputs(self, kept: Kept) -> None:
        """Add the inputs of the segments to what leaves the device's memory."""

        def held(tensor: Tensor) -> Tensor:
            # An object of our own: a layer may have returned one that it keeps.
            own = tensor.detach().requires_grad_(tensor.requires_grad)
            kept.hold(own)
            return own

        self._kept = [each._replace(input=map_tensors(held, each.input)) for each in self._kept]

    def drop(self) -> None:
        """Forget F, so that the backward repeats nothing: it has no gradient to compute."""
        self._kept, self._updated = [], []

    @property
    def restores_buffers(self) -> bool:
        """Whether the backward ends with the buffers of its beginning, because F has updated some."""
        return bool(self._updated)

    def backward(self, gradient: Gradient | None, *, needs_input_grad: bool) -> Gradient | None:
        """Run I or B: repeat every segment and propagate; returns the gradient of the first segment's input.

        Parameters
        ----------
        gradient
            The gradient of the output; None if the output is the loss.
        needs_input_grad
            Whether the result is needed; otherwise it is None.
        """
        with _keeping_buffers(self._updated):
            while self._kept:
                kept = self._kept.pop()
                gradient = self._through(kept, gradient, is_data=not self._kept and not needs_input_grad)
        return gradient if needs_input_grad else None

    def _through(self, kept: _Kept, gradient: Gradient | None, *, is_data: bool) -> Gradient:
        if _versions(kept.input) != kept.versions:
            raise ModelError(
                "a layer wrote to a tensor that a layer before it passed on, and is recomputed from. Do not "
                "write to a layer's input (no inplace=True), or plan without recomputing the stage."
            )
        x, leaves = enter(kept.input, is_data=is_data)
        auxiliary = self._auxiliary
        repeating = Running(auxiliary, "repeated")
        with repeating, torch.enable_grad(), _drawing_again(kept.random, device_of(x)), self._computing(x):
            output = kept.segment(x)
        if self._check is not None:
            self._check(tensors_of(output), leaves)
        if gradient is None and self._seed is not None:
            gradient = self._seed(output)
        edges, gradients = auxiliary.take_roots()
        for edge, each in _roots(output, kept.flags, gradient):
            edges.append(edge)
            gradients.append(each)
        # The output's values are not needed, unless the graph saved them.
        is_single = is_plain(x)
        del output, x
        if edges:
            torch.autograd.backward(edges, gradients)
        return take_gradient(leaves, is_single=is_single) if leaves else ()


def checked_segment(layer: nn.Module, keywords: Mapping[str, Any], stage: int) -> Segment:
    """A layer as a segment, which raises :class:`ModelError` if the layer writes to its input."""

    def run(x: Any) -> Any:
        tensors = list(tensors_of(x))
        versions = _versions(tensors)
        output = call(layer, x, keywords)
        # Without a graph autograd does not notice a changed input, and the recomputation would differ.
        if _versions(tensors) != versions:
            raise ModelError(
                f"stage {stage}: a {type(layer).__name__} modified its input, from which the layer "
                f"is recomputed. Do not write to a layer's input (no inplace=True), or plan without "
                f"recomputing the stage."
            )
        return output

    return run


def parameters_of_several(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trainable parameters that several of these layers share."""
    users = Counter(parameter for layer in layers for parameter in layer.parameters())
    return [parameter for parameter, count in users.items() if count > 1 and parameter.requires_grad]


def require_no_hooks(shared: Iterable[nn.Parameter], stage: int) -> None:
    """Refuse hooks of parameters that several layers share.

    The backward runs layer by layer, so it would call a hook once per layer with a partial gradient.
    """
    if any(map(has_hooks, shared)):
        raise ModelError(
            f"stage {stage}: a parameter that several layers share has hooks, and the plan "
            f"recomputes the stage. Remove the hooks, or plan without recomputing the stage."
        )


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors_of(value))


def _states_of_buffers(module: nn.Module) -> list[object]:
    """Something that differs after the module has updated its buffers."""
    if isinstance(module, _NormBase) and module.training:  # whose operators count no version
        return [object()]
    return [(id(each), each._version) for each in module._buffers.values() if each is not None]


@contextmanager
def _keeping_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context after which the modules have the buffers of before, with their values."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                module._buffers[name] = buffer.copy_(value)


def _flags(output: Any) -> tuple[bool, ...]:
    return (True,) if is_plain(output) else tuple(tensor.requires_grad for tensor in tensors_of(output))


def _roots(
    output: Any, flags: Sequence[bool], gradient: Gradient | None
) -> Iterator[tuple[GradientEdge, Tensor]]:
    """The tensors of an output that need a backward, with their gradients."""
    remaining = iter(as_list(gradient))
    for tensor, flag in zip(tensors_of(output), flags, strict=True):
        if flag:
            each = next(remaining)
            if tensor.requires_grad:
                yield get_gradient_edge(tensor), each


def default_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that modules draw from by default."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, *torch.cuda.default_generators[index : index + 1]


def _states(generators: Sequence[torch.Generator]) -> tuple[Tensor, ...]:
    return tuple(generator.get_state() for generator in generators)


def _differ(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return any(_bytes(a) != _bytes(b) for a, b in zip(before, after, strict=True))


def _bytes(state: Tensor) -> bytes:
    # Not by an operator, which dispatch modes would intercept (FLOP counters, fake tensors).
    return string_at(state.data_ptr(), state.nbytes)


@contextmanager
def _drawing_again(random: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """A context that repeats the random numbers of F; restores the generators afterwards."""
    if random is None:
        yield
        return
    generators = default_generators(device)
    now = _states(generators)
    try:
        for generator, state in zip(generators, random, strict=True):
            generator.set_state(state)
        yield
    finally:
        for generator, state in zip(generators, now, strict=True):
            generator.set_state(state)
