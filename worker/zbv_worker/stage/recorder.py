"""Prepares the modules of a stage to queue weight gradients, and undoes that; which queue they use now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zbv_worker.errors import ModelError
from zbv_worker.stage.layers import LayerSequence
from zbv_worker.stage.split_backward import (
    Call,
    Node,
    Queueing,
    QueueingEmbedding,
    QueueingLinear,
    cast_like_autocast,
    ordinary_class,
)
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
        self.seen: list[Call] | None = None
        self.nodes: dict[int, Node] = {}

    @property
    def in_action(self) -> InAction:
        """What the action in progress has set."""
        return self.queue, self.tapping, self.seen

    @in_action.setter
    def in_action(self, value: InAction) -> None:
        self.queue, self.tapping, self.seen = value

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        """Copied or saved modules get a new recorder, because nodes of autograd cannot be copied."""
        return Recorder, ()

    @contextmanager
    def watching(self) -> Iterator[list[Call]]:
        """A context that collects the calls of modules that queue, in order."""
        seen: list[Call] = []
        self.seen = seen
        try:
            yield seen
        finally:
            self.seen = None

    @contextmanager
    def tapping_into(self, tapping: Tapping) -> Iterator[None]:
        """A context in which modules expose what W needs, instead of queueing it."""
        self.tapping = tapping
        try:
            yield
        finally:
            self.tapping = None

    @contextmanager
    def into(self, queue: WeightGrads | None) -> Iterator[None]:
        """A context in which forwards of the tree will queue their weight gradients into ``queue``."""
        before, self.queue = self.queue, queue
        try:
            yield
        finally:
            self.queue = before


InAction = tuple[WeightGrads | None, "Tapping | None", list[Call] | None]
"""What an action in progress has set on a recorder."""


class Tap(torch.autograd.Function):
    """Returns the output unchanged; the tap gets the output's gradient too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tap: Tensor) -> Tensor:
        """The output."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The output's gradient, twice."""
        (grad_output,) = grad_outputs
        return grad_output, grad_output


class Tapping:
    """What the compiled modules of one forward expose for W: :mod:`zbv_worker.stage.compiled`.

    Attributes
    ----------
    taps
        One input per call, whose gradient will be that of the call's output.
    inputs
        The inputs of the calls so far, or what the hooks of saved tensors have made of them.
    """

    __slots__ = ("inputs", "taps", "unpack")

    def __init__(self) -> None:
        self.taps: list[Tensor] = []
        self.inputs: list[Any] = []
        self.unpack: Callable[[Any], Tensor] | None = None

    def keep(self) -> None:
        """Call after the forward: pass the inputs to the hooks of saved tensors, as autograd would."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            pack, self.unpack = hooks
            self.inputs = list(map(pack, self.inputs))

    def kept(self) -> list[Tensor]:
        """The inputs, for the backward."""
        return self.inputs if self.unpack is None else list(map(self.unpack, self.inputs))

    def linear(self, module: Any, x: Tensor) -> Tensor:
        """The output of a Linear, and a tap."""
        if torch.is_autocast_enabled(x.device.type):
            x = cast_like_autocast(x, torch.get_autocast_dtype(x.device.type))
        bias = None if module.bias is None else module.bias.detach()
        return self._tapped(x, nnf.linear(x, module.weight.detach(), bias))

    def embedding(self, module: Any, indices: Tensor) -> Tensor:
        """The output of an Embedding, and a tap."""
        return self._tapped(indices, nnf.embedding(indices, module.weight.detach(), module.padding_idx))

    def _tapped(self, x: Tensor, output: Tensor) -> Tensor:
        self.inputs.append(x.detach())
        tapped: Tensor = Tap.apply(output, self.taps[len(self.inputs) - 1])  # type: ignore[no-untyped-call]  # torch's own
        return tapped


@cache
def queueing_class(behaviour: Any, kind: Any) -> Any:
    """A subclass of a module's class that queues; it has the name of that class."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (behaviour, kind), {"ordinary": kind, **names})


def ordinary_forward(module: Any, *arguments: Any) -> Any:
    """The forward of a module's ordinary class, also of a module that no longer queues."""
    return getattr(type(module), "ordinary", type(module)).forward(module, *arguments)


_BEHAVIOUR: dict[type[nn.Module], type[Queueing]] = {
    nn.Linear: QueueingLinear,
    nn.Embedding: QueueingEmbedding,
}


def defer_weight_gradients(module: nn.Module) -> Recorder:
    """Prepare a module tree in place; returns its recorder. Idempotent.

    Changes only the exact classes ``nn.Linear`` and ``nn.Embedding``, because a subclass may use its weight
    differently. Modules that are :class:`Queueing` already get the recorder. Trees that share modules share a
    recorder; a rank runs one action at a time.

    Raises
    ------
    ModelError
        If the tree has a DistributedDataParallel, whose hooks are invisible to Python, a module that defers
        its weight gradients by itself, or one whose parameters are not initialized yet.
    """
    for child in module.modules():
        _require_splittable(child)
    children = [child for child in module.modules() if isinstance(child, (nn.Linear, nn.Embedding, Queueing))]
    known = [child.recorder for child in children if isinstance(child, Queueing)]
    recorder = next((each for each in known if each is not None), None) or Recorder()
    for child in children:
        if type(child) in _BEHAVIOUR:
            # Changing the class preserves parameters, hooks and state-dict names.
            kind: Any = type(child)
            behaviour: Any = _BEHAVIOUR[kind]
            child.__class__ = queueing_class(behaviour, kind)
        if isinstance(child, Queueing):
            child.recorder = recorder
            recorder.modules.add(child)
    return recorder


def _require_splittable(module: nn.Module) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ModelError(
            "found a DistributedDataParallel in a stage; it sums gradients before W has computed them. Build "
            "the stage without it, and pass --data-parallel."
        )
    if any(map(is_lazy, module.parameters(recurse=False))):
        raise ModelError(
            f"found a {type(module).__name__} whose parameters have no shapes yet. Build it with all sizes, "
            f"or call the layers once before the pipeline is made, each with the output of the one before."
        )
    delays: Any = getattr(module, "need_backward_dw", None)  # as modules of TransformerEngine have it
    if callable(delays) and delays():
        raise ModelError(
            f"found a {type(module).__name__} that computes its weight gradients only in backward_dw(), "
            f"which nothing calls here. Build it with delay_wgrad_compute=False; I then computes them."
        )


def stop_deferring(module: nn.Module) -> None:
    """Undo what prepared a stage: its modules get back the classes that they had.

    So do modules that have left the tree, and those whose class was changed since.
    """
    recorders = {id(it): it for it in map(_recorder_of, module.modules()) if it is not None}
    children = set(module.modules()).union(*(recorder.modules for recorder in recorders.values()))
    for child in children:
        if _recorder_of(child) is not None:
            del vars(child)["recorder"]
            vars(child).pop("is_tapped", None)
        if isinstance(child, Queueing):
            child.__class__ = ordinary_class(type(child))
    if type(module) is LayerSequence:
        module.__class__ = nn.Sequential  # type: ignore[assignment]  # the class of which it is one


def _recorder_of(module: nn.Module) -> Recorder | None:
    found = vars(module).get("recorder")  # users may have attributes of that name
    return found if isinstance(found, Recorder) else None


def deferred_parameters(module: nn.Module) -> set[Tensor]:
    """The parameters of a prepared tree whose gradients W will compute, as far as known before F."""
    found: set[Tensor] = set()
    for child in module.modules():
        if isinstance(child, QueueingEmbedding) and not child.is_divisible:
            continue
        own = [p for p in child.parameters(recurse=False) if p.requires_grad]
        if isinstance(child, Queueing) and all(p.dtype in FLOATS and not has_hooks(p) for p in own):
            found.update(own)
    return found


@dataclass(frozen=True)
class SplitShare:
    """The share of a stage's weight gradients that W computes."""

    share: float
    """The share of the elements of all trainable parameters, 0 to 1."""
    unsplit: tuple[str, ...]
    """The modules whose gradients I computes, as ``name (Class)``, those with the most parameters first."""

    @classmethod
    def of(cls, module: nn.Module, queued: Collection[Tensor]) -> SplitShare | None:
        """The share of a module with these queued parameters; None without trainable parameters."""
        trainable = {parameter for parameter in module.parameters() if parameter.requires_grad}
        elements = sum(parameter.numel() for parameter in trainable)
        if not elements:
            return None
        left: dict[str, int] = {}
        for name, child in module.named_modules():
            own = [p for p in child.parameters(recurse=False) if p in trainable and p not in queued]
            if own:
                left[f"{name or 'the stage'} ({type(child).__name__})"] = sum(p.numel() for p in own)
        split = sum(parameter.numel() for parameter in trainable if parameter in queued)
        return cls(split / elements, tuple(sorted(left, key=lambda each: -left[each])))

    @property
    def is_small(self) -> bool:
        """Whether W is too small to fill many bubbles."""
        return self.share < 0.5

    def __str__(self) -> str:
        some, more = ", ".join(self.unsplit[:3]), len(self.unsplit) - 3
        others = f" and {more} more" if more > 0 else ""
        return f"W computes {self.share:.0%} of the weight gradients; I computes those of {some}{others}"
