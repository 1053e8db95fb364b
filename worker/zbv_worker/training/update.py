"""From a step's gradients to updated parameters: clipping, loss scaling, optimizer, schedule.

Clipping by the global norm, float16's overflow check, and skipping steps that are not finite need a sum over
all ranks: no rank's step ends before all ranks have their gradients. Plans for such runs should minimise the
makespan. Failing at a step that is not finite needs no sum: every rank checks its own gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zbv_worker.model.protocol import PipelineModel, Scheduled
from zbv_worker.training.gradients import Gradients
from zbv_worker.training.loss_scale import LossScale
from zbv_worker.transport.channels import Transport

NonFinite = Literal["fail", "skip", "continue"]
"""What to do if a step's loss or gradients are infinite or NaN."""


@dataclass(frozen=True)
class Updated:
    """The outcome of an update.

    Attributes
    ----------
    gradient_norm
        The norm over all parameters of the model, before clipping; None if it was not needed.
    is_skipped
        Whether the parameters were left unchanged.
    non_finite
        The values that were infinite or NaN, by name (``loss``, ``gradient norm``), if this rank is the one
        to report them. Overflows that a smaller loss scale may avoid are not included.
    is_failed
        Whether the run must end because of them.
    """

    gradient_norm: float | None = None
    is_skipped: bool = False
    non_finite: tuple[tuple[str, float], ...] = ()
    is_failed: bool = False


class Update:
    """A rank's optimizer and the processing of gradients before it.

    Parameters
    ----------
    clip_norm
        The longest allowed gradient, over all parameters of all ranks; None for no limit.
    non_finite
        With ``fail`` and ``skip`` the parameters stay unchanged; the caller must raise the error. Equal on
        all ranks.
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
        """Update the parameters; collective if a sum over all ranks is needed.

        Parameters
        ----------
        loss
            The step's loss, on ranks that know it.
        factor
            The factor to multiply gradients by; equal on all ranks.

        Raises
        ------
        TimeoutError, ConnectionError
            If a rank does not take part.
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
        """Update without communication."""
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
