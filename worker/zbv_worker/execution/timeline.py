"""When actions happen: on the host, which runs them itself, or on a GPU, where the host only queues them.

On the CPU an action is complete when its call returns, and its times are the clock's. On a GPU the host runs
ahead of the device: times are events on the compute stream, converted to the host's clock at the end of the
step.

=========  ==========================================  ====================================================
a record   on the CPU                                  on a GPU
=========  ==========================================  ====================================================
``wait``   the rank turned to the action               the compute stream was free and the action was queued
``start``  the action's input was available            the stream passed the wait for the input
``end``    the action was complete                     the stream passed the action
=========  ==========================================  ====================================================
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from zbv_solver.plans.orders import Action

from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.transport.torch_api import CudaApi, CudaEvent, torch_cuda

Clock = Callable[[], int]

DEFAULT_RUN_AHEAD = 4
"""How many actions the host may be ahead of a GPU: enough to hide the time for queueing them."""

_POLL_SECONDS = 0.00005
_NANOSECONDS_PER_MILLISECOND = 1e6


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
    run_ahead
        How many queued actions may be incomplete; None if an action completes within its call.
    """

    run_ahead: int | None = None

    def __init__(self, clock: Clock = time.perf_counter_ns):
        self.mark: Callable[[], Any] = clock

    def begin(self) -> None:
        """Start a step; marks of earlier steps become invalid."""

    def resolved(self, records: Iterable[Record]) -> tuple[Record, ...]:
        """Replace the marks of records by nanoseconds; all marks must have been passed."""
        return tuple(records)


class CudaTimeline:
    """Like :class:`HostTimeline`, but a mark is an event on the compute stream.

    Events are reused in every step. At the end of a step the host waits for one more event and pairs it with
    its clock; CUDA measures the other events against it, to about a microsecond. The pairing is as precise as
    the host is quick to notice the event: some ten microseconds.
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
        """Use this thread's stream, and reuse all events."""
        self._stream = self._cuda.current_stream(self._device)
        self._used = 0

    def mark(self) -> Any:
        """An event at the current end of the stream's queue."""
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


Timeline = HostTimeline | CudaTimeline


class Overdue(Exception):
    """The device did not complete an action within the timeout.

    Attributes
    ----------
    started
        Whether the action had its input; if so, no peer is to blame.
    """

    def __init__(self, instruction: Instruction, *, started: bool):
        super().__init__(str(instruction.action))
        self.instruction = instruction
        self.started = started


class Queued:
    """Queued actions of a step that a GPU may not have completed, oldest first; limits the host's lead.

    Parameters
    ----------
    limit
        The most actions in the queue; :meth:`make_room` waits for the device until one more fits.
    timeout
        Seconds for each action, counted from the later of: its predecessor was complete, the host began to
        wait for it.
    check
        Raises an error if something else has failed; called while the host waits.
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
        """Add an action that was queued between two marks."""
        self._waiting.append((instruction, start, end))

    def make_room(self) -> None:
        """Wait until one more action fits; raises :class:`Overdue`."""
        self._drain(self._limit - 1)

    def finish(self) -> None:
        """Wait until all actions are complete; raises :class:`Overdue`."""
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
