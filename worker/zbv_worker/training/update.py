"""From a step's gradients to the next step's parameters: clipping, loss scaling, optimizer, schedule.

Clipping by the global norm, and float16's search for overflows, need a number of all ranks: no rank's step
ends before every rank's gradients are there. A plan for such a run should minimise the makespan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from zbv_worker.model import PipelineModel
from zbv_worker.training.gradients import Gradients
from zbv_worker.training.precision import LossScale
from zbv_worker.transport.channels import Transport


@runtime_checkable
class Scheduled(Protocol):
    """A model that changes the learning rate from step to step."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The schedule of one rank's optimizer; the same on every rank."""


@dataclass(frozen=True)
class Updated:
    """What an update found.

    Attributes
    ----------
    gradient_norm
        Of all parameters of the model, before clipping; None when nobody asked.
    is_skipped
        Whether the gradients had overflowed, and the parameters stayed as they were.
    """

    gradient_norm: float | None = None
    is_skipped: bool = False


class Update:
    """The optimizer of a rank and what comes before it.

    Parameters
    ----------
    clip_norm
        Longest gradient, all parameters of all ranks together; None for no limit.
    """

    def __init__(
        self,
        model: PipelineModel,
        gradients: Gradients,
        transport: Transport,
        loss_scale: LossScale,
        clip_norm: float | None,
    ):
        self._gradients = gradients
        self._transport = transport
        self._clip_norm = clip_norm
        self.loss_scale = loss_scale
        parameters = gradients.parameters
        self.optimizer = model.optimizer(parameters) if parameters else None
        has_schedule = self.optimizer is not None and isinstance(model, Scheduled)
        self.schedule: Any = model.schedule(self.optimizer) if has_schedule else None  # type: ignore[attr-defined]  # checked

    def apply(self, timeout: float) -> Updated:
        """Update the parameters; collective when a norm is needed. Raises TimeoutError, ConnectionError."""
        if self._clip_norm is None and not self.loss_scale.is_dynamic:
            self._step()
            return Updated()
        squared = self._transport.sum_over_ranks(self._gradients.square_sum(), timeout)
        norm = math.sqrt(float(squared)) / self.loss_scale.value if squared >= 0 else math.nan
        is_finite = math.isfinite(norm)
        factor = 1.0 / self.loss_scale.value
        if self._clip_norm is not None and is_finite:
            factor *= min(1.0, self._clip_norm / (norm + 1e-6))
        is_skipped = self.loss_scale.is_dynamic and not is_finite
        if not is_skipped:
            self._gradients.scale(factor)
            self._step()
        self.loss_scale.update(is_finite=is_finite)
        return Updated(norm, is_skipped)

    def _step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
