"""Which modules queue their weight gradients now, and where: the state that the modules of a stage share."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from zbv_worker.stage.dtensors import is_distributed_kind
from zbv_worker.stage.weight_grads import WeightGrads, has_hooks
from zbv_worker.values.structure import FLOATS


class Recorder:
    """Selects the queue for the modules of one tree.

    The modules refer to the recorder directly, not through thread-local state: activation checkpointing runs
    the forward again inside I, which on CUDA happens on a thread of autograd.

    Attributes
    ----------
    modules
        The modules that were prepared. Some may have left the tree since.
    """

    def __init__(self) -> None:
        self.queue: WeightGrads | None = None
        self.tapping: Tapping | None = None
        self.modules: WeakSet[nn.Module] = WeakSet()
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
    """A module whose weight gradients can be queued; the first base class of :func:`queueing_class`."""

    ordinary: ClassVar[type[nn.Module]]
    """The class of the module before it was prepared."""
    recorder: Recorder | None = None
    """The recorder of the tree; None until :func:`defer_weight_gradients` has prepared it."""
    is_tapped = False
    """Whether compiled code exposes what W needs."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and saved modules are ordinary modules, which need neither zbv nor a pipeline."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *others = reduced
        state = {name: value for name, value in state.items() if name not in ("recorder", "is_tapped")}
        return copyreg._reconstructor, (ordinary_class(type(self)), object, None), state, *others  # type: ignore[attr-defined]


@cache
def queueing_class(behaviour: Any, kind: Any) -> Any:
    """A subclass of a module's class that queues; it has the name of that class."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (behaviour, kind), {"ordinary": kind, **names})


def ordinary_class(kind: Any) -> Any:
    """The class that a module has when it no longer queues.

    torch's parametrizations and ``fully_shard`` derive a class from the one that they find, which may be one
    that queues. The result is then a class with the same members, derived from the ordinary class; for a
    class with calls of ``super()``, which only that class itself can make, the class with other bases.
    """
    if not issubclass(kind, Queueing):
        return kind
    if "ordinary" in vars(kind):
        return kind.ordinary
    bases = tuple(map(ordinary_class, kind.__bases__))
    members = {name: it for name, it in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    if any("__class__" in it.__code__.co_freevars for it in members.values() if isinstance(it, FunctionType)):
        kind.__bases__ = bases
        return kind
    return type(kind)(kind.__name__, bases, members)


def ordinary_forward(module: Any, *arguments: Any) -> Any:
    """The forward of a module's ordinary class, also of a module that no longer queues."""
    return getattr(type(module), "ordinary", type(module)).forward(module, *arguments)


def queue_for(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> WeightGrads | None:
    """The queue for the weight gradients of a call, or None if autograd must compute them.

    A parameter that is not a leaf is computed from other tensors (weight norm, a functional call). Its
    gradient must propagate further, so it cannot be deferred. Complex, sparse and nested tensors, and the
    subclasses of other libraries, are left to autograd, which has rules for each. So are layers that the user
    compiles: their backward is compiled as a whole.
    """
    if torch.compiler.is_compiling():
        return None
    recorder: Recorder | None = getattr(module, "recorder", None)
    if recorder is None or recorder.queue is None or recorder.tapping is not None:
        return None
    if not torch.is_grad_enabled() or not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if weight.dtype not in FLOATS or not (_is_dense(x) and _may_queue(recorder, weight)):
        return None
    return recorder.queue if bias is None or _may_queue(recorder, bias) else None


def _may_queue(recorder: Recorder, parameter: Tensor) -> bool:
    if not parameter.requires_grad:
        return _is_dense(parameter)
    is_leaf = isinstance(parameter, nn.Parameter) and parameter.is_leaf
    return is_leaf and _is_dense(parameter) and recorder.defers(parameter)


def _is_dense(tensor: Tensor) -> bool:
    kind = type(tensor)
    if not (kind is Tensor or kind is nn.Parameter or kind is FakeTensor or is_distributed_kind(kind)):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


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
