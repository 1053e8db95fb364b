"""A step of one rank: launched, then complete.

On a GPU the host launches a step's actions long before they are complete. It learns their times, and the
step's losses, while it launches the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zbv_worker.execution.timeline import Record, Timeline


@dataclass(frozen=True)
class StepResult:
    """One step of one rank."""

    step: int
    losses: dict[int, float]
    """Losses by microbatch; empty on ranks without the last stage."""
    records: tuple[Record, ...]
    """One per action, in execution order."""
    update_seconds: float = 0.0
    """Time from the end of the last action to the end of what :meth:`Launched.end` concluded."""
    numbers: tuple[float, ...] = ()
    """The numbers that were passed to :meth:`Launched.end`."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the rank's first action to the end of its last."""
        return (self.records[-1].end - self.records[0].start) / 1e9

    @property
    def loss(self) -> float | None:
        """The mean loss over the microbatches; None on ranks without the last stage."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None


@dataclass(frozen=True)
class DeviceWaits:
    """How the end of a step on a GPU is queued, and waited for; see :class:`Queued`."""

    add_end: Callable[[Any, Any], None]
    finish: Callable[[], list[float]]


class Launched:
    """A step whose actions are launched; on a GPU they may not be complete.

    Parameters
    ----------
    losses
        Losses by microbatch, on the rank's device; empty on ranks without the last stage.
    records
        One per action, with marks of the timeline.
    waits
        None if everything launched is complete.
    """

    def __init__(
        self,
        step: int,
        losses: Mapping[int, Tensor],
        records: Sequence[Record],
        timeline: Timeline,
        waits: DeviceWaits | None = None,
    ):
        self.step = step
        self.losses = losses
        self._records = records
        self._timeline = timeline
        self._waits = waits
        self._read_losses = timeline.reading([*losses.values()])
        self._read_numbers: Callable[[], list[float]] = list
        self._end: list[Record] = []
        self._result: StepResult | None = None

    def end(self, numbers: Sequence[Tensor] = ()) -> None:
        """Call once the step's update is launched; does not wait. A second call has no effect.

        Parameters
        ----------
        numbers
            Tensors of one number each, for :attr:`StepResult.numbers`.
        """
        if self._end:
            return
        self._read_numbers = self._timeline.reading(numbers)
        last = self._records[-1]
        end = Record(last.action, last.end, last.end, self._timeline.mark())
        self._end = [end]
        if self._waits is not None:
            self._waits.add_end(end.start, end.end)

    def result(self) -> StepResult:
        """Wait until the step, and its update if it has one, is complete; raises like :meth:`Executor.step`.

        On a GPU it must be called, or the next step launched, before the step after that is launched.
        """
        if self._result is None:
            self.end()
            bounds = [] if self._waits is None else self._waits.finish()
            *records, end = self._timeline.resolved([*self._records, *self._end], bounds)
            losses = dict(zip(self.losses, self._read_losses(), strict=True))
            seconds = (end.end - end.start) / 1e9
            self._result = StepResult(self.step, losses, tuple(records), seconds, tuple(self._read_numbers()))
        return self._result
