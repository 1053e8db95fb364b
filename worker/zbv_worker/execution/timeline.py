"""When actions happen: on the host, which runs them itself, or on a GPU, which the host only queues them for.

On the CPU an action is over when its call returns, and its times are the clock's. On a GPU the host runs
ahead of the device: times are events on the compute stream, and become times of the host's clock when the
step is over.

=========  ==========================================  ====================================================
a record   on the CPU                                  on a GPU
=========  ==========================================  ====================================================
``wait``   the rank turned to the action               the compute stream was free, and the action queued
``start``  its input was there                         the stream came past the wait for its input
``end``    it was done                                 the stream came past the action
=========  ==========================================  ====================================================
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from zbv_solver.plans.orders import Action

from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.transport.cuda_api import CudaApi, CudaEvent, torch_cuda

Clock = Callable[[], int]

DEFAULT_RUN_AHEAD = 4
"""Actions that the host may be ahead of a GPU: enough to hide the time it takes to queue them."""

_POLL_SECONDS = 0.00005
_NANOSECONDS_PER_MILLISECOND = 1e6


class Record(NamedTuple):
    """When an action happened, in nanoseconds of the rank's clock.

    ``wait`` is when the rank turned to the action, ``start`` when its input was there, ``end`` when it was
    done; ``received`` is the size in bytes of an input that came from another rank.
    """

    action: Action
    wait: int
    start: int
    end: int
    received: int = 0


class Timeline(Protocol):
    """Marks points in time. A mark is the timeline's own affair until :meth:`resolved`."""

    @property
    def mark(self) -> Callable[[], Any]:
        """Marks the point that the rank has come to."""

    @property
    def run_ahead(self) -> int | None:
        """How many actions may be queued and not done; None where an action is done when its call returns."""

    def begin(self) -> None:
        """A step begins; marks of earlier steps are void."""

    def resolved(self, records: Iterable[Record]) -> tuple[Record, ...]:
        """The records with nanoseconds in place of marks, all of which have been passed."""


class HostTimeline:
    """A mark is the time itself."""

    run_ahead: int | None = None

    def __init__(self, clock: Clock = time.perf_counter_ns):
        self.mark: Callable[[], Any] = clock

    def begin(self) -> None:
        """Nothing to prepare."""

    def resolved(self, records: Iterable[Record]) -> tuple[Record, ...]:
        """The records as they are."""
        return tuple(records)


class CudaTimeline:
    """A mark is an event on the compute stream.

    Events are used again in every step. At a step's end one more event is waited for and paired with the
    host's clock; CUDA measures the others against it, to about a microsecond. The pairing is as good as the
    host is quick to notice: some ten microseconds.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Clock = time.perf_counter_ns,
        run_ahead: int = DEFAULT_RUN_AHEAD,
        cuda: CudaApi | None = None,
    ):
        self.run_ahead: int | None = run_ahead
        self._device = device
        self._clock = clock
        self._cuda = cuda if cuda is not None else torch_cuda()
        self._events: list[CudaEvent] = []
        self._used = 0
        self._stream = self._cuda.current_stream(device)

    def begin(self) -> None:
        """Take this thread's stream, and all events back."""
        self._stream = self._cuda.current_stream(self._device)
        self._used = 0

    def mark(self) -> CudaEvent:
        """An event where the stream's queue ends now."""
        if self._used == len(self._events):
            self._events.append(self._cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(self._stream)
        return event

    def resolved(self, records: Iterable[Record]) -> tuple[Record, ...]:
        """The records on the host's clock."""
        reference = self.mark()
        reference.synchronize()
        now = self._clock()

        def on_host(mark: Any) -> int:
            before: float = mark.elapsed_time(reference)
            return now - round(before * _NANOSECONDS_PER_MILLISECOND)

        return tuple(
            Record(r.action, on_host(r.wait), on_host(r.start), on_host(r.end), r.received) for r in records
        )


def timeline_of(device: torch.device, clock: Clock = time.perf_counter_ns) -> Timeline:
    """The timeline of a device."""
    return CudaTimeline(device, clock) if device.type == "cuda" else HostTimeline(clock)


class Overdue(Exception):
    """The device has not come past an action for a whole timeout.

    Attributes
    ----------
    started
        Whether it had the action's input: then it is not a peer that it waits for.
    """

    def __init__(self, instruction: Instruction, *, started: bool):
        super().__init__(str(instruction.action))
        self.instruction = instruction
        self.started = started


class Queued:
    """The actions of a step that a GPU may not have come past, oldest first: keeps the host near it.

    Parameters
    ----------
    limit
        Actions that may be in it; :meth:`drain` waits for the device where there are more.
    timeout
        Seconds for each action, from when the one before was done or, if that is later, from when the host
        had to wait for it.
    check
        Raises when something else has failed; called while the host waits.
    """

    def __init__(
        self,
        limit: int,
        timeout: float,
        check: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ):
        self._limit = limit
        self._timeout = timeout
        self._check = check
        self._now = now
        self._pause = pause
        self._waiting: deque[tuple[Instruction, CudaEvent, CudaEvent]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, instruction: Instruction, start: CudaEvent, end: CudaEvent) -> None:
        """An action was queued between these marks."""
        self._waiting.append((instruction, start, end))

    def make_room(self) -> None:
        """Before an action is queued: wait until fewer than the limit are; raises :class:`Overdue`."""
        self._drain(self._limit - 1)

    def finish(self) -> None:
        """Wait for all of them; raises :class:`Overdue`."""
        self._drain(0)

    def _drain(self, most: int) -> None:
        waiting = self._waiting
        since: float | None = None
        while len(waiting) > most:
            instruction, start, end = waiting[0]
            if end.query():
                waiting.popleft()
                since = None
                continue
            self._check()
            now = self._now()
            if since is None:
                since = now
            elif now - since > self._timeout:
                raise Overdue(instruction, started=start.query())
            self._pause(_POLL_SECONDS)
