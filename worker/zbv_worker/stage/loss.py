"""The loss of the last stage: a mean over a microbatch, or a sum and its weight.

Layers of any stage may add losses, such as the balancing loss of experts. Such a loss becomes one more root
of its stage's backward, next to the gradients of the stage's output. Its gradient is the main loss's: the
loss scale divided by the number of microbatches. So the result is the gradient of the main loss plus the mean
of the auxiliary losses over the microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from zbv_worker.errors import InvalidRun, ModelError, describe_error
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.values.structure import tensors_of

if TYPE_CHECKING:
    from zbv_worker.stage.recorder import Recorder
    from zbv_worker.stage.weight_grads import WeightGrads

Loss = Callable[[Any, Any], Any]
"""Takes output and target; returns the mean over a microbatch, or a pair of sum and weight."""


@dataclass(frozen=True)
class WeightedLoss:
    """A loss whose function returns the sum over a microbatch and its weight."""

    function: Callable[[Any, Any], tuple[Tensor, Tensor]]


class Objective:
    """Computes the loss of one stage, checks it, and adds up the weights of its microbatches.

    Attributes
    ----------
    is_weighted
        Whether the loss is a pair; for a plain function, known after the first call.
    outputs
        The model's outputs since this was set to a list, in the order of the calls; None to keep none.
    """

    def __init__(self, loss: Loss | WeightedLoss):
        self.outputs: list[Any] | None = None
        self._last_output: Any = None
        self.is_weighted = self._must_have_weight = isinstance(loss, WeightedLoss)
        self._function = loss.function if isinstance(loss, WeightedLoss) else loss
        self._last_weight: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._seed: tuple[float, Tensor] | None = None
        self._sizes: set[int] = set()

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss of a microbatch, a scalar; raises :class:`ModelError` if it is not one number."""
        kept = None if self.outputs is None else tree_map(_detached, output)
        try:
            found: object = self._function(output, target)
        except (AttributeError, TypeError) as error:
            if target is not None:
                raise
            raise InvalidRun(
                f"the loss got None as target and failed: {describe_error(error)}. Pass targets to step and "
                f"evaluate on ranks with the last layer, or use a loss that needs none."
            ) from error
        self._last_output = kept  # now: the function may have handed over to another microbatch
        if isinstance(found, tuple) and len(found) == 2:
            found, weight = found
            self.is_weighted = True
        elif self._must_have_weight:
            weight = None
        else:
            self._sizes.add(_size_of(target) or _size_of(output))
            return checked_loss(found)
        if not isinstance(weight, Tensor | int | float) or (
            isinstance(weight, Tensor) and weight.numel() != 1
        ):
            raise ModelError(f"the loss returned {shown(weight)} as the weight; must return (sum, weight).")
        # float64, because float32 counts exactly only to 16 million.
        self._last_weight = weight.detach().double() if isinstance(weight, Tensor) else float(weight)
        return checked_loss(found)

    def count(self) -> None:
        """Count the weight and the output of the last call; recomputations do not count."""
        if self.outputs is not None:
            self.outputs.append(self._last_output)
            self._last_output = None
        if self.is_weighted:
            self._weight = self._weight + self._last_weight

    def take_weight(self) -> Tensor | float:
        """The sum of the counted weights since the last call of this method; does not wait for a GPU."""
        weight, self._weight = self._weight, 0.0
        return weight

    def require_equal_sizes(self) -> None:
        """Call after a step: raise :class:`ModelError` if its microbatches need weights and have none."""
        sizes, self._sizes = self._sizes, set()
        if len(sizes) > 1 and not self.is_weighted:
            raise ModelError(
                f"the loss returned means over microbatches with targets of {min(sizes)} to {max(sizes)} "
                f"numbers; the mean of such means is not the mean over the batch. Return a pair of the sum "
                f"and its weight, such as the number of tokens (as loss_sum, if the model has methods). For "
                f"equal weights, return (mean, 1.0)."
            )

    def seed(self, loss: Tensor, value: float) -> Tensor:
        """The gradient of the loss; autograd only reads it, so microbatches share one tensor.

        Raises :class:`ModelError` if the loss has no graph.
        """
        if not loss.requires_grad:
            raise ModelError(
                "the loss does not depend on anything that requires a gradient, so the step would train "
                "nothing. Compute it from the output with torch's operators, without detach(), item(), "
                "numpy, no_grad() or integers, and leave at least one parameter trainable."
            )
        known = self._seed
        if known is None or known[0] != value or known[1].dtype is not loss.dtype:
            known = self._seed = (value, torch.full_like(loss, value, requires_grad=False))
        return known[1]


def no_loss(output: Any, target: Any) -> Tensor:
    """In place of the loss of a model that is only evaluated."""
    return torch.zeros(())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def checked_loss(loss: object) -> Tensor:
    """Return a loss if it is valid; raises :class:`ModelError` otherwise."""
    if type(loss) is not Tensor and is_dtensor(loss):
        loss = loss.full_tensor()
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        of_several = f" of {loss.numel()} numbers" if isinstance(loss, Tensor) else ""
        raise ModelError(
            f"the loss returned {shown(loss)}{of_several}; must be one floating-point number, the mean "
            f"over a microbatch, or a pair of a sum and its weight (from loss_sum, if the model has that)."
        )
    return loss


def _size_of(value: Any) -> int:
    """The number of elements in a value's tensors."""
    if isinstance(value, Tensor):
        return value.numel()
    return sum(tensor.numel() for tensor in tensors_of(value))


def shown(output: object) -> str:
    """The class of a value, for errors."""
    return f"a {output.dtype} tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"


Phase = Literal["forward", "repeated", "backward", "evaluation"]
"""
Why a layer runs: F; a recomputed segment in the backward; a module's own checkpointing in the backward; an
evaluation.
"""


def add_auxiliary_loss(x: Tensor, loss: Tensor, weight: Tensor | float | None = None) -> Tensor:
    """Add a loss to the training from inside a layer; returns ``x`` with the same values.

    Use the returned tensor in place of ``x``. The loss is averaged over the microbatches and added to the
    main loss; multiply it by a coefficient before. Recomputations count it once, evaluations do not count it.
    Outside of a pipeline's stage, ``backward()`` through the returned tensor adds the gradient of ``loss``.

    Parameters
    ----------
    x
        Any activation of the layer, of a floating dtype.
    loss
        A mean over the microbatch, one floating-point number.
    weight
        The number of tokens that ``loss`` is a mean over. If the main loss is a sum with a weight, the
        auxiliary loss is averaged by these weights: the gradient is that of Σ weight·loss divided by the sum
        of the main loss's weights, and a weight is required. Otherwise it has no effect.

    Raises
    ------
    ModelError
        If the loss is not one number, or a weight is needed.
    """
    return _add(x, loss, weight)


def _add(x: Tensor, loss: Tensor, weight: Tensor | float | None) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ModelError(
            f"add_auxiliary_loss got a loss of {getattr(loss, 'shape', type(loss).__name__)}; must be one "
            f"floating-point number. Take the mean over the microbatch."
        )
    active = getattr(_OF_THREAD, "active", None) or _newest()
    if active is None:
        return _attached(x, loss, 1.0)
    return active.add(x, loss, weight)


def leave_uncompiled() -> None:
    """Let compiled layers call :func:`add_auxiliary_loss` uncompiled, because it acts on the stage."""
    global _add
    if not hasattr(_add, "_torchdynamo_orig_callable"):
        _add = torch.compiler.disable(_add)  # type: ignore[no-untyped-call]  # torch's own


InAction = tuple[Phase, list[GradientEdge], list[Tensor]]
"""What an action in progress has set on a stage's auxiliary losses."""


class _OfThread(threading.local):
    active: AuxiliaryLosses | None = None


_OF_THREAD = _OfThread()
_ACTIVE: list[AuxiliaryLosses] = []
"""The stages that run a backward, in all threads."""


def _newest() -> AuxiliaryLosses | None:
    """The stage whose backward runs a layer again on a thread of autograd, as on a GPU."""
    return _ACTIVE[-1] if _ACTIVE else None


class AuxiliaryLosses:
    """The auxiliary losses of one stage.

    Attributes
    ----------
    factor
        The gradient of every loss.
    is_weighted
        Whether the main loss is a sum with a weight.
    edges
        Where the losses of the forward that has just run enter its graph.
    """

    def __init__(self, *, is_weighted: bool) -> None:
        self.factor = 1.0
        self.is_weighted = is_weighted
        self.phase: Phase = "forward"
        self._sum: Tensor | float = 0.0
        self.edges: list[GradientEdge] = []
        self._seeds: list[Tensor] = []

    def add(self, x: Tensor, loss: Tensor, weight: Tensor | float | None) -> Tensor:
        """Add a loss; see :func:`add_auxiliary_loss`."""
        if self.phase == "evaluation":
            return x
        factor: Tensor | float = self.factor
        if self.is_weighted:
            if weight is None:
                raise ModelError(
                    "add_auxiliary_loss needs a weight, because the model's loss is a sum with a weight. "
                    "Pass weight=, the number of tokens that the auxiliary loss is a mean over."
                )
            factor = factor * weight
            counted: Tensor | float = weight
        else:
            counted = 1.0
        if self.phase == "forward":
            self._sum = self._sum + loss.detach().float() * counted
        if self.phase == "backward":
            return _attached(x, loss, factor)
        if loss.requires_grad and torch.is_grad_enabled():
            self.edges.append(get_gradient_edge(loss))
            self._seeds.append(torch.zeros_like(loss, requires_grad=False) + factor)
        return x

    @property
    def in_action(self) -> InAction:
        """What the action in progress has set."""
        return self.phase, self.edges, self._seeds

    @in_action.setter
    def in_action(self, value: InAction) -> None:
        self.phase, self.edges, self._seeds = value

    def take_roots(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """The :attr:`edges`, and the gradients of their losses."""
        edges, seeds = self.edges, self._seeds
        self.edges, self._seeds = [], []
        return edges, seeds

    def take_sum(self) -> Tensor | float:
        """The sum of all losses, times their weights if weighted, since the last call; does not wait."""
        found, self._sum = self._sum, 0.0
        return found


class Running:
    """A context in which layers of a stage run, or its backward.

    Not a generator-based context, which would take longer; every action enters one.

    Parameters
    ----------
    losses
        Those that the layers may add to.
    recorder, queue
        Of the stage, and where its layers queue their weight gradients; None to leave that as it is.
    """

    __slots__ = ("_before", "_losses", "_phase", "_queue", "_recorder")

    def __init__(
        self,
        losses: AuxiliaryLosses,
        phase: Phase,
        recorder: Recorder | None = None,
        queue: WeightGrads | None = None,
    ):
        self._losses, self._phase = losses, phase
        self._recorder, self._queue = recorder, queue

    def __enter__(self) -> None:
        losses, recorder = self._losses, self._recorder
        self._before = losses.phase, _OF_THREAD.active
        losses.phase, _OF_THREAD.active = self._phase, losses
        if self._phase == "backward":
            _ACTIVE.append(losses)
        if recorder is not None:
            recorder.queue, self._queue = self._queue, recorder.queue

    def __exit__(self, *_: object) -> None:
        self._losses.phase, _OF_THREAD.active = self._before
        if self._phase == "backward":
            _ACTIVE.remove(self._losses)
        if self._recorder is not None:
            self._recorder.queue = self._queue


class _Attached(torch.autograd.Function):
    """Returns ``x``; the loss gets a constant gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: Tensor | float) -> Tensor:
        ctx.factor, ctx.like = factor, (loss.shape, loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype, device = ctx.like
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device) + ctx.factor, None


def _attached(x: Tensor, loss: Tensor, factor: Tensor | float) -> Tensor:
    """Attach a loss to a tensor, whose backward then adds the loss's gradient."""
    if not loss.requires_grad or not torch.is_grad_enabled():
        return x
    found: Tensor = _Attached.apply(x, loss, factor)  # type: ignore[no-untyped-call]  # torch's own
    return found
