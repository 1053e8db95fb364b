"""Which modules queue their weight gradients now, and where: the state that the modules of a stage share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zbv_worker.stage.weight_grads import WeightGrads, has_hooks


class Recorder:
    """Selects the queue for the modules of one tree.

    The modules refer to the recorder directly, not through thread-local state: activation checkpointing runs
    the forward again inside I, which on CUDA happens on a thread of autograd.
    """

    def __init__(self) -> None:
        self.queue: WeightGrads | None = None
        self.tapping: Tapping | None = None
        self._seen: list[Call] | None = None
        self._nodes: dict[int, _Node] = {}

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        """Copied or saved modules get a new recorder, because nodes of autograd cannot be copied."""
        return Recorder, ()

    def defers(self, parameter: Tensor) -> bool:
        """Whether the gradient of a leaf may be queued, i.e. the leaf has no hooks."""
        if not parameter.requires_grad:
            return True
        node = self._nodes.get(id(parameter))
        if node is None or node.parameter is not parameter:
            node = self._nodes[id(parameter)] = _Node(parameter)
        return node.references == _REFERENCES and not has_hooks(parameter)

    def note(self, module: Queueing, output: Tensor) -> None:
        """Record a call that queues, for :meth:`watching`."""
        if self._seen is not None:
            self._seen.append(Call(module, output.shape, output.dtype))

    @contextmanager
    def watching(self) -> Iterator[list[Call]]:
        """A context that collects the calls of modules that queue, in order."""
        seen: list[Call] = []
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    @contextmanager
    def tapping_into(self, tapping: Tapping) -> Iterator[None]:
        """A context in which modules expose what W needs, instead of queueing it."""
        self.tapping = tapping
        try:
            yield
        finally:
            self.tapping = None

    def into(self, queue: WeightGrads | None) -> _Into:
        """A context in which forwards of the tree will queue their weight gradients into ``queue``."""
        return _Into(self, queue)


class Tapping:
    """What the compiled modules of one forward expose for W: :mod:`zbv_worker.stage.compiled`.

    Attributes
    ----------
    taps
        One input per call, whose gradient will be that of the call's output.
    inputs
        The inputs of the calls so far.
    """

    __slots__ = ("inputs", "taps")

    def __init__(self) -> None:
        self.taps: list[Tensor] = []
        self.inputs: list[Tensor] = []


class _Into:
    """Not a generator-based context, which would take three times as long; every F and I enters one."""

    __slots__ = ("_before", "_queue", "_recorder")

    def __init__(self, recorder: Recorder, queue: WeightGrads | None):
        self._recorder = recorder
        self._queue = queue

    def __enter__(self) -> None:
        self._before = self._recorder.queue
        self._recorder.queue = self._queue

    def __exit__(self, *_: object) -> None:
        self._recorder.queue = self._before


@dataclass(frozen=True)
class Call:
    """A call of a module that queued its weight gradient: the module, and its output's shape and dtype."""

    module: Any
    shape: torch.Size
    dtype: torch.dtype

    @property
    def is_deferrable(self) -> bool:
        """Whether the gradients may still be queued, i.e. the parameters have no hooks."""
        return all(map(self.module.recorder.defers, self.module.parameters(recurse=False)))


class Queueing:
    """A module whose weight gradients can be queued; a second base class of subclasses of a module's class.

    Attributes
    ----------
    recorder
        The recorder of the tree; None until :func:`defer_weight_gradients` has prepared it.
    is_tapped
        Whether compiled code exposes what W needs.
    """

    recorder: Recorder | None = None
    is_tapped = False


def queue_for(recorder: Recorder | None, weight: Tensor) -> WeightGrads | None:
    """The queue for a weight's gradient, or None if autograd must compute it.

    A weight that is not a leaf is computed from other tensors (weight norm, a functional call). Its gradient
    must propagate further, so it cannot be deferred.
    """
    if recorder is None or recorder.queue is None or not torch.is_grad_enabled() or not weight.is_leaf:
        return None
    if not isinstance(weight, nn.Parameter) or torch._C._are_functorch_transforms_active():
        return None
    return recorder.queue if recorder.defers(weight) else None


class _Node:
    """A parameter's AccumulateGrad node, to detect whether anyone else refers to it.

    Megatron-LM's distributed optimizer and torch's optimizers in the backward register hooks on the node.
    They cannot be listed, but they vanish with the node. So their owner must keep a reference to the node,
    and Python counts those. All graphs through the node together count as one reference, or as none in some
    versions of torch; a permanent graph here makes that constant.
    """

    __slots__ = ("_graph", "_node", "parameter")

    def __init__(self, parameter: Tensor):
        self.parameter = parameter
        with torch.enable_grad():
            self._graph = parameter.view_as(parameter)
        self._node = get_gradient_edge(parameter).node

    @property
    def references(self) -> int:
        return sys.getrefcount(self._node)


_REFERENCES = _Node(torch.zeros(1, requires_grad=True)).references
"""The reference count of a node that nobody else refers to."""
