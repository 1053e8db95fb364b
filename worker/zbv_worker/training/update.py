"""From a step's gradients to the next step's parameters: clipping, loss scaling, optimizer, schedule.

Clipping by the global norm, float16's search for overflows, and leaving out steps that are not finite need a
number of all ranks: no rank's step ends before every rank's gradients are there. A plan for such a run should
minimise the makespan. To fail at a step that is not finite, every rank looks at its own gradients alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from zbv_worker.execution.precision import LossScale
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.training.gradients import Gradients
from zbv_worker.transport.channels import Transport


@runtime_checkable
class Scheduled(Protocol):
    """A model that changes the learning rate from step to step."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule of one rank's optimizer; the same on every rank."""


NonFinite = Literal["fail", "skip", "continue"]
"""What to do with a step whose loss or gradients are infinite or not a number."""


@dataclass(frozen=True)
class Updated:
    """What an update found.

    Attributes
    ----------
    gradient_norm
        Of all parameters of the model, before clipping; None when nobody asked.
    is_skipped
        Whether the parameters stayed as they were.
    non_finite
        What was infinite or not a number (``loss``, ``gradient norm``), and its value, as far as this rank is
        the one to report it. Overflows that a smaller loss scale may avoid do not count.
    is_failed
        Whether the run is to end because of that.
    """

    gradient_norm: float | None = None
    is_skipped: bool = False
    non_finite: tuple[tuple[str, float], ...] = ()
    is_failed: bool = False


class Update:
    """The optimizer of a rank and what comes before it.

    Parameters
    ----------
    clip_norm
        Longest gradient, all parameters of all ranks together; None for no limit.
    non_finite
        With ``fail`` and ``skip`` the parameters stay as they were; failing is the caller's part. Must be the
        same on all ranks.
    """

    def __init__(
        self,
        model: PipelineModel,
        gradients: Gradients,
        transport: Transport,
        loss_scale: LossScale,
        clip_norm: float | None,
        non_finite: NonFinite = "fail",
    ):
        self._gradients = gradients
        self._transport = transport
        self._clip_norm = clip_norm
        self._non_finite = non_finite
        self.loss_scale = loss_scale
        parameters = gradients.parameters
        self.optimizer = model.optimizer(parameters) if parameters else None
        has_schedule = self.optimizer is not None and isinstance(model, Scheduled)
        self.schedule: Any = model.schedule(self.optimizer) if has_schedule else None  # type: ignore[attr-defined]  # checked

    def apply(self, timeout: float, loss: float | None = None, factor: float = 1.0) -> Updated:
        """Update the parameters; collective when a number of all ranks is needed.

        Parameters
        ----------
        loss
            Of the step, where this rank knows it.
        factor
            What the gradients are to be multiplied by; the same on all ranks.

        Raises
        ------
        TimeoutError, ConnectionError
        """
        found = [] if loss is None or math.isfinite(loss) else [("loss", loss)]
        is_shared = self._clip_norm is not None or self.loss_scale.is_dynamic or self._non_finite == "skip"
        if not is_shared:
            return self._apply_alone(found, factor)
        bad_loss = torch.tensor(float(len(found)), dtype=torch.float64)
        mine = torch.stack([self._gradients.square_sum(), bad_loss])
        squared, bad_losses = self._transport.sum_over_ranks(mine, timeout).tolist()
        factor /= self.loss_scale.value
        norm = math.sqrt(squared) * factor if squared >= 0 else math.nan
        is_finite = math.isfinite(norm)
        if not is_finite and self._transport.rank == 0:
            found.append(("gradient norm", norm))
        is_overflow = not is_finite and self.loss_scale.may_shrink and not bad_losses
        is_bad = not is_overflow and (not is_finite or bad_losses > 0)
        is_skipped = is_overflow or (is_bad and self._non_finite != "continue")
        if not is_skipped:
            if self._clip_norm is not None and is_finite:
                factor *= min(1.0, self._clip_norm / (norm + 1e-6))
            self._gradients.scale(factor)
            self._step()
        self.loss_scale.update(is_finite=is_finite)
        is_failed = is_bad and self._non_finite == "fail"
        return Updated(norm, is_skipped, tuple(found) if is_bad else (), is_failed)

    def _apply_alone(self, found: list[tuple[str, float]], factor: float) -> Updated:
        """Without a word to the other ranks."""
        if self._non_finite == "fail":
            squared = float(self._gradients.square_sum())
            if not math.isfinite(squared):
                found.append(("gradient norm", math.sqrt(squared) if squared >= 0 else math.nan))
            if found:
                return Updated(is_skipped=True, non_finite=tuple(found), is_failed=True)
        self._gradients.scale(factor)
        self._step()
        return Updated(non_finite=tuple(found))

    def _step(self) -> None:
        self._gradients.hand_over()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
