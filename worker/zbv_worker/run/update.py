"""From a step's gradients to updated parameters: clipping, loss scaling, optimizer, schedule.

Clipping by the global norm, float16's overflow check, and skipping steps that are not finite need a sum over
all ranks: no rank's step ends before all ranks have their gradients. Plans for such runs should minimise the
makespan. Failing at a step that is not finite needs no sum: every rank checks its own gradients.

On a GPU the update is only queued: the norm, the clipping factor and whether the step is finite are computed
on the device, and the host reads them while it launches the next step. What to do with a step that is not
finite is then decided as follows.

==========================  ============================================================================
the run                     on a GPU
==========================  ============================================================================
continues                   always queues the optimizer's step
fails                       queues it too: the run ends one step later, before any checkpoint, and nothing
                            else sees the parameters
skips, with fused Adam(W)   queues it with the optimizer's ``found_inf``, which leaves parameters and state
                            unchanged on the device
skips, otherwise            waits for the device, because only the host can omit the optimizer's step
scales the loss (float16)   waits for the device, because the next step's loss needs the new factor
==========================  ============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zbv_worker.gradients.gradients import Gradients
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.model.optimizers import optimizer_of
from zbv_worker.model.protocol import PipelineModel, Scheduled
from zbv_worker.tracing.report import Updated
from zbv_worker.transport.channels import Transport

NonFinite = Literal["fail", "skip", "continue"]
"""What to do if a step's loss or gradients are infinite or NaN."""


class Update:
    """A rank's optimizer and the processing of gradients before it.

    Parameters
    ----------
    clip_norm
        The longest allowed gradient, over all parameters of all ranks; None for no limit.
    non_finite
        With ``fail`` and ``skip`` the parameters stay unchanged, except on a GPU before a failure; the caller
        must raise the error. Equal on all ranks.
    device
        Where the rank computes.
    names
        The parameters' names in the whole model, for a model with
        :class:`~zbv_worker.model.protocol.NamedOptimizer`.
    is_late
        Whether the host must not wait for the device, except where the table above says so.
    """

    def __init__(
        self,
        model: PipelineModel,
        gradients: Gradients,
        transport: Transport,
        loss_scale: LossScale,
        clip_norm: float | None,
        non_finite: NonFinite = "fail",
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        *,
        names: Mapping[nn.Parameter, str] | None = None,
        is_late: bool = False,
    ):
        self._gradients = gradients
        self._transport = transport
        self._clip_norm = clip_norm
        self._non_finite = non_finite
        self._device = device
        self.loss_scale = loss_scale
        parameters = gradients.parameters
        named = [((names or {}).get(parameter, ""), parameter) for parameter in parameters]
        self.optimizer = optimizer_of(model, named) if named else None
        # An optimizer may have made the gradients parts of one buffer.
        self._kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        has_schedule = self.optimizer is not None and isinstance(model, Scheduled)
        self.schedule: Any = model.schedule(self.optimizer) if has_schedule else None  # type: ignore[attr-defined]  # checked
        self._is_shared = clip_norm is not None or loss_scale.is_dynamic or non_finite == "skip"
        self._may_skip = loss_scale.is_dynamic or non_finite != "continue"
        self._is_late = is_late
        self._is_masked = is_late and self._may_skip and _can_mask(self.optimizer)
        self._has_loss = False

    @property
    def must_wait(self) -> bool:
        """Whether the host must settle a step before it launches the next one."""
        return not self._is_late or self.loss_scale.is_dynamic

    def launch(
        self, timeout: float, loss: Tensor | None = None, factor: Tensor | float = 1.0
    ) -> list[Tensor]:
        """Queue the update of the parameters; collective if a sum over all ranks is needed.

        Returns numbers for :meth:`settle`, as scalars on the device.

        Parameters
        ----------
        loss
            The step's loss, a scalar, on ranks that know it.
        factor
            The factor to multiply gradients by; equal on all ranks.

        Raises
        ------
        TimeoutError, ConnectionError
            If a rank does not take part.
        """
        self._has_loss = loss is not None
        none = torch.zeros((), dtype=torch.float64, device=self._device)
        loss = none if loss is None else loss
        norm, bad_losses, factor = self._norm(timeout, (~loss.isfinite()).double(), none, factor)
        is_finite = norm.isfinite()
        is_overflow = ~is_finite & (bad_losses == 0) & self.loss_scale.may_shrink
        is_bad = ~is_overflow & (~is_finite | (bad_losses > 0))
        is_skipped = is_overflow if self._non_finite == "continue" else is_overflow | is_bad
        if self._clip_norm is not None:
            shorter = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            factor = factor * torch.where(is_finite, shorter, 1.0)
        if self._is_masked:
            self._step(factor, is_skipped)
        elif not (self._is_skipped_by_host and bool(is_skipped)):
            self._step(factor)
        return [loss, norm, is_skipped, is_bad]

    def settle(self, numbers: Sequence[float]) -> Updated:
        """Continue on the host from the numbers of the newest :meth:`launch`; returns the outcome."""
        loss, norm, is_skipped, is_bad = numbers
        if not is_skipped and self.schedule is not None:
            self.schedule.step()
        found = []
        if self._has_loss and not math.isfinite(loss):
            found.append(("loss", loss))
        if not math.isfinite(norm) and (self._transport.rank == 0 or not self._is_shared):
            found.append(("gradient norm", norm))
        if self._is_shared:
            self.loss_scale.update(is_finite=math.isfinite(norm))
        return Updated(
            norm if self._is_shared else None,
            bool(is_skipped),
            tuple(found) if is_bad else (),
            bool(is_bad) and self._non_finite == "fail",
        )

    @property
    def _is_skipped_by_host(self) -> bool:
        """Whether the host omits the optimizer's step, for which it must know whether the step is finite."""
        # A late run that fails applies the step: see the module's table.
        is_only_failing = self._non_finite == "fail" and not self.loss_scale.is_dynamic
        is_needed = self._may_skip and self.optimizer is not None
        return is_needed and not (self._is_late and is_only_failing)

    def _norm(
        self, timeout: float, bad_loss: Tensor, none: Tensor, factor: Tensor | float
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """The gradients' norm, the number of bad losses, and the factor of the gradients."""
        if not self._may_skip and not self._is_shared:
            return none, bad_loss, factor
        squared = self._gradients.square_sum()
        squared = none if squared is None else squared
        if not self._is_shared:
            return squared.sqrt(), bad_loss, factor
        squared, bad_losses = self._transport.sum_over_ranks(
            torch.stack([squared, bad_loss]), timeout
        ).unbind()
        factor = factor / self.loss_scale.value
        return squared.sqrt() * factor, bad_losses, factor

    def _step(self, factor: Tensor | float, is_skipped: Tensor | None = None) -> None:
        """Scale the gradients and run the optimizer, which does nothing on the device if told so."""
        self._gradients.scale(factor if self._is_late else float(factor))
        self._gradients.hand_over()
        for parameter, kept in self._kept:
            grad, parameter.grad = parameter.grad, kept
            kept.copy_(torch.zeros_like(kept) if grad is None else grad)
        if self.optimizer is None:
            return
        if is_skipped is None:
            self.optimizer.step()
            return
        optimizer: Any = self.optimizer
        optimizer.found_inf = is_skipped.float()
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf


def _can_mask(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer can leave parameters and state unchanged if a tensor on the device says so.

    The fused Adam and AdamW can. The fused SGD cannot: it would begin with momentum that is not initialised.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return all(bool(group["fused"]) for group in optimizer.param_groups)  # type: ignore[union-attr]  # not None
