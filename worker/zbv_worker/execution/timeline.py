"""Steps of one rank, and when their actions happen: on the host, or on a GPU, where they are queued.

On the CPU an action is complete when its call returns, and its times are the clock's. On a GPU the host runs
ahead of the device: times are events on the compute stream. They are converted to the host's clock once the
device has passed them, which the host learns while it launches the next step; it never waits only for times.

=========  ==========================================  ====================================================
a record   on the CPU                                  on a GPU
=========  ==========================================  ====================================================
``wait``   the rank turned to the action               the compute stream was free and the action was queued
``start``  the action's input was available            the stream passed the wait for the input
``end``    the action was complete                     the stream passed the action
=========  ==========================================  ====================================================

CUDA measures times between events, but not on the host's clock. For each event the host knows a time before
which the device had not passed it: when the host queued it, or when it last polled it in vain. The device
passes an event soon after it is queued if the device is idle, and soon after a vain poll if the host is
ahead. So the latest of these bounds, over all events of a step, gives the offset between the clocks.

So a step is launched long before it is complete (:class:`Launched`). The host learns its times and losses
while it launches the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from zbv_solver.plans.orders import Action

from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.host.process import Clock, HostClock
from zbv_worker.transport.torch_api import CudaApi, CudaEvent, CudaStream, torch_cuda

DEFAULT_RUN_AHEAD = 4
"""How many actions the host may be ahead of a GPU: enough to hide the time for queueing them."""

_POLL_SECONDS = 0.00005
_NANOSECONDS_PER_MILLISECOND = 1e6
_NANOSECONDS = 1e9


class Record(NamedTuple):
    """When an action happened, in nanoseconds of the rank's clock.

    ``wait`` is when the rank turned to the action, ``start`` when its input was available, ``end`` when it
    was complete; ``received`` is the size in bytes of an input from another rank, else 0.
    """

    action: Action
    wait: int
    start: int
    end: int
    received: int = 0


class HostTimeline:
    """A mark is the host's time.

    Attributes
    ----------
    mark
        Marks the rank's current point in time; only :meth:`resolved` can interpret the mark.
    mark_here
        On a GPU, marks the current point of the stream that the calling thread queues on.
    """

    run_ahead: int | None = None
    """How many queued actions may be incomplete; None if an action completes within its call."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns):
        self.mark: Callable[[], Any] = now
        self.mark_here: Callable[[], Any] = now
        self.clock: Clock = HostClock()

    def begin(self) -> None:
        """Start a step; marks of the step before the last become invalid."""

    def resolved(self, records: Sequence[Record], bounds: Sequence[float]) -> tuple[Record, ...]:
        """Replace the marks of a step's records by nanoseconds; all must have been passed.

        Parameters
        ----------
        bounds
            For each record, a time in seconds of :attr:`clock` before which its end was not passed.
        """
        return tuple(records)

    def reading(self, tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
        """Start to read tensors of one number each; the result is valid once a later mark is passed."""
        return lambda: [float(tensor) for tensor in tensors]


class CudaTimeline:
    """Like :class:`HostTimeline`, but a mark is an event on the compute stream.

    Two sets of events alternate, because a step's marks are converted while the next step is launched.

    Parameters
    ----------
    pin
        Read numbers through pinned memory; a copy to pageable memory blocks the host.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Clock | None = None,
        run_ahead: int = DEFAULT_RUN_AHEAD,
        cuda: CudaApi | None = None,
        *,
        pin: bool = True,
    ):
        self.run_ahead: int | None = run_ahead
        self.clock: Clock = HostClock() if clock is None else clock
        self._device = device
        self._pin = pin
        self.cuda = cuda if cuda is not None else torch_cuda()
        self._events: list[CudaEvent] = []
        self._others: list[CudaEvent] = []
        self._used = 0
        self._stream = self.cuda.current_stream(device)

    def begin(self) -> None:
        """Use this thread's stream, and reuse the events of the step before the last."""
        self._stream = self.cuda.current_stream(self._device)
        self._events, self._others = self._others, self._events
        self._used = 0

    def mark(self) -> Any:
        """An event at the current end of the stream's queue."""
        return self._marked(self._stream)

    def mark_here(self) -> Any:
        """Like :meth:`mark`, of the stream that the calling thread queues on."""
        return self._marked(self.cuda.current_stream(self._device))

    def _marked(self, stream: CudaStream) -> CudaEvent:
        if self._used == len(self._events):
            self._events.append(self.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(stream)
        return event

    def resolved(self, records: Sequence[Record], bounds: Sequence[float]) -> tuple[Record, ...]:
        """See :meth:`HostTimeline.resolved`."""
        base: Any = records[0].end

        def after(mark: Any) -> int:
            milliseconds: float = base.elapsed_time(mark)
            return round(milliseconds * _NANOSECONDS_PER_MILLISECOND)

        offset = max(
            round(bound * _NANOSECONDS) - after(record.end)
            for record, bound in zip(records, bounds, strict=True)
        )
        return tuple(
            Record(
                r.action, offset + after(r.wait), offset + after(r.start), offset + after(r.end), r.received
            )
            for r in records
        )

    def reading(self, tensors: Sequence[Tensor]) -> Callable[[], list[float]]:
        """See :meth:`HostTimeline.reading`."""
        if not tensors:
            return list
        numbers = torch.cat([tensor.detach().reshape(1).double() for tensor in tensors])
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=self._pin)
        host.copy_(numbers, non_blocking=True)
        return host.tolist


Timeline = HostTimeline | CudaTimeline


class Patience(NamedTuple):
    """How long to wait for one tensor or action, and the option that sets it."""

    seconds: float
    option: str = "--timeout"


class QueuedWork(NamedTuple):
    """Work that a GPU may not have completed: an action, or what follows a step's last action (None).

    ``walk`` numbers the walks through action lists; unlike ``step`` it is never the same twice.
    """

    walk: int
    step: int
    instruction: Instruction | None
    start: CudaEvent
    end: CudaEvent
    patience: Patience


class Overdue(Exception):
    """The device did not complete some work within its timeout.

    Attributes
    ----------
    started
        Whether the work had its input; if so, the rank that sends it is not to blame.
    """

    def __init__(self, work: QueuedWork, *, started: bool):
        super().__init__(str(work))
        self.work = work
        self.started = started


class Queued:
    """Queued work that a GPU may not have completed, oldest first; limits the host's lead, also across steps.

    Parameters
    ----------
    limit
        The most entries in the queue; :meth:`make_room` waits for the device until one more fits.
    check
        Raises an error if something else has failed; called while the host waits.
    progress
        Updated with the rank that the device waits for.
    """

    def __init__(
        self, limit: int, check: Callable[[], None], clock: Clock, progress: CurrentProgress | None = None
    ):
        self._limit = limit
        self._progress = progress or CurrentProgress()
        self._check = check
        self._clock = clock
        self._waiting: deque[tuple[QueuedWork, float]] = deque()
        self._bounds: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: QueuedWork) -> None:
        """Add work that was just queued.

        Its timeout counts from the later of: its predecessor was complete, the host began to wait for it.
        """
        self._waiting.append((work, self._clock.now()))

    def make_room(self) -> None:
        """Wait until one more entry fits; raises :class:`Overdue`."""
        while len(self._waiting) >= self._limit:
            self._wait_for_oldest()

    def finish(self, walk: int) -> list[float]:
        """Wait until a walk's work is complete; raises :class:`Overdue`.

        Returns, for each entry of the walk, a time in seconds before which it was not complete.
        """
        while self._waiting and self._waiting[0][0].walk <= walk:
            self._wait_for_oldest()
        return self._bounds.pop(walk)

    def _wait_for_oldest(self) -> None:
        work, bound = self._waiting[0]
        now = since = self._clock.now()
        while not work.end.query():
            bound = now
            peer = None if work.instruction is None else work.instruction.peer
            self._progress.waiting_for = None if peer is None or work.start.query() else peer
            self._check()
            if now - since > work.patience.seconds:
                raise Overdue(work, started=work.start.query())
            self._clock.pause(_POLL_SECONDS)
            now = self._clock.now()
        self._progress.waiting_for = None
        self._waiting.popleft()
        self._bounds.setdefault(work.walk, []).append(bound)


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
