"""Checks of real CUDA streams, events and copies: the behaviour that the timeline and the staging rely on.

The measurements use a :class:`Bench`, so that they also run on a model of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from zbv_solver.plans.orders import Action

from zbv_worker.execution.timeline import CudaTimeline, Record
from zbv_worker.gpu_report.check import (
    Answers,
    Line,
    Place,
    ReportOptions,
    at_most,
    informative,
    largest,
    that,
)
from zbv_worker.transport.staging import Staging
from zbv_worker.transport.torch_api import Clock, CudaApi, CudaEvent, CudaStream, HostClock, torch_cuda

DELAY = 50.0
"""Milliseconds of a kernel that only takes time."""

STREAMS = 16
"""More streams than the hardware queues of CUDA's default, 8."""

CLOCK_LIMIT = 200.0
"""Microseconds: short against an action, and long against the host's noticing of an event."""

_CYCLES = 10_000_000
MARKS = 20
_NUMBERS = 1 << 18
_SIDE = 512
_TIMED_TOLERANCE = 0.2


class Bench(Protocol):
    """A device to measure on."""

    @property
    def cuda(self) -> CudaApi:
        """The functions of ``torch.cuda``."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""

    def delay(self, stream: CudaStream, milliseconds: float) -> None:
        """Queue a kernel that only takes time."""

    def fill(self, stream: CudaStream, tensor: Tensor, value: float) -> None:
        """Queue a kernel that writes one value everywhere."""

    def copy(self, stream: CudaStream, source: Tensor, target: Tensor) -> None:
        """Queue a copy between tensors of the device."""

    def load_product(self) -> None:
        """Queue a product on the current stream whose kernel was not used before."""

    @property
    def clock(self) -> Clock:
        """The host's clock."""


class GpuBench:
    """The GPU of a process; its clock rate is measured first, because delays are counted in cycles."""

    def __init__(self, device: torch.device):
        self.cuda = torch_cuda()
        self.device = device
        self.clock = HostClock()
        self._sleep: Callable[[int], None] = cast(Any, torch.cuda)._sleep
        self._sleep(1000)  # loads the kernel
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self.cuda.current_stream(device)
        start.record(stream)
        self._sleep(_CYCLES)
        end.record(stream)
        end.synchronize()
        self._cycles_per_millisecond = _CYCLES / start.elapsed_time(end)

    def delay(self, stream: Any, milliseconds: float) -> None:
        """See :class:`Bench`."""
        with self.cuda.stream(stream):
            self._sleep(int(milliseconds * self._cycles_per_millisecond))

    def fill(self, stream: Any, tensor: Tensor, value: float) -> None:
        """See :class:`Bench`."""
        with self.cuda.stream(stream):
            tensor.fill_(value)

    def copy(self, stream: Any, source: Tensor, target: Tensor) -> None:
        """See :class:`Bench`."""
        with self.cuda.stream(stream):
            target.copy_(source)

    def load_product(self) -> None:
        """See :class:`Bench`."""
        left = torch.ones(_SIDE, _SIDE, dtype=torch.complex128, device=self.device)
        torch.mm(left, left)


def measure_events(place: Place) -> Any:
    """Measure events and streams of the process's GPU."""
    return {**events(GpuBench(place.device)), "priorities": cast(Any, torch.cuda.Stream).priority_range()}


def events(bench: Bench) -> dict[str, Any]:
    """The order of events, their times, and the refusals that torch documents."""
    cuda = bench.cuda
    first, second = (cuda.Stream(bench.device) for _ in range(2))
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(first)
    bench.delay(first, DELAY)
    end.record(first)
    second.wait_event(end)
    after = cuda.Event(enable_timing=True)
    after.record(second)
    early = after.query()
    refuses_unfinished = _refuses(lambda: begin.elapsed_time(after))
    after.synchronize()
    untimed = cuda.Event(enable_timing=False)
    untimed.record(first)
    untimed.synchronize()
    return {
        "early": early,
        "in_order": end.query(),
        "milliseconds": begin.elapsed_time(end),
        "after": end.elapsed_time(after),
        "unrecorded": cuda.Event(enable_timing=True).query(),
        "refuses_unfinished": refuses_unfinished,
        "refuses_untimed": _refuses(lambda: untimed.elapsed_time(end)),
        "overtaken": overtaken(bench),
    }


def overtaken(bench: Bench) -> int:
    """How many of some streams end their work while another stream is busy."""
    cuda = bench.cuda
    begin = cuda.Event(enable_timing=True)
    begin.record(cuda.current_stream(bench.device))
    others = [cuda.Stream(bench.device) for _ in range(STREAMS)]
    busy = cuda.Stream(bench.device)
    ends: list[CudaEvent] = []
    for _ in range(2):  # the second waits at the head of a hardware queue, and blocks those that share it
        bench.delay(busy, DELAY / 2)
    for stream in others:
        stream.wait_event(begin)
        ends.append(cuda.Event(enable_timing=True))
        ends[-1].record(stream)
    for event in ends:
        event.synchronize()
    return sum(begin.elapsed_time(event) < DELAY / 4 for event in ends)


def judge_events(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_events`."""
    (found,) = answers
    yield that("a stream that waits for an event stops until it has passed", not found["early"], "it ran on")
    yield that(
        "events pass in the order of their streams",
        found["in_order"] and found["after"] >= 0,
        "another order",
    )
    error = abs(found["milliseconds"] / DELAY - 1)
    yield at_most(f"elapsed_time of a kernel of {DELAY:g} ms: relative error", error, _TIMED_TOLERANCE)
    yield that("query() of an event that was never recorded is True", found["unrecorded"], "it is False")
    for name, what in (("refuses_unfinished", "before it has passed"), ("refuses_untimed", "without timing")):
        yield that(f"elapsed_time of an event {what} is refused", found[name], "it returned a value")
    yield that(
        f"{STREAMS} streams end their work while another stream is busy",
        found["overtaken"] == STREAMS,
        "streams share a hardware queue; set CUDA_DEVICE_MAX_CONNECTIONS=32",
        f"{found['overtaken']} of {STREAMS}",
    )
    if "priorities" in found:
        lowest, highest = found["priorities"]
        yield that(
            "streams have a higher priority than the default", highest < 0, "none", f"{lowest} to {highest}"
        )


def measure_clock(place: Place) -> Any:
    """Measure the timeline of the process's GPU."""
    return clock_errors(GpuBench(place.device))


def clock_errors(bench: Bench) -> list[float]:
    """How far marks of a timeline lie outside of the time in which the host saw them pass, in us."""
    timeline = CudaTimeline(bench.device, bench.clock, cuda=bench.cuda)
    timeline.begin()
    stream = bench.cuda.current_stream(bench.device)
    queued, seen, records = [], [], []
    for index in range(MARKS):
        queued.append(bench.clock.now())
        mark = timeline.mark()
        mark.synchronize()
        seen.append(bench.clock.now())
        records.append(Record(Action(0, "F", index), mark, mark, mark))
        bench.delay(stream, 1.0)
    ends = [record.end / 1e9 for record in timeline.resolved(records, queued)]
    return [
        1e6 * max(0.0, before - end, end - after)
        for before, after, end in zip(queued, seen, ends, strict=True)
    ]


def judge_clock(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_clock`."""
    (found,) = answers
    yield at_most(
        f"largest error of {len(found)} marks on the host's clock", largest(found), CLOCK_LIMIT, "us"
    )


def measure_copies(place: Place) -> Any:
    """Measure the staging of the process's GPU."""
    return copies(GpuBench(place.device), Staging(place.device))


def copies(bench: Bench, staging: Staging) -> dict[str, Any]:
    """Copies in both directions, each after a kernel that takes time and writes or reads the tensor."""
    compute = bench.cuda.current_stream(bench.device)
    tensor = torch.zeros(_NUMBERS, device=bench.device)
    bench.delay(compute, DELAY)
    bench.fill(compute, tensor, 7.0)
    before = bench.clock.now()
    sent, copied = staging.outwards(tensor)
    host = 1e3 * (bench.clock.now() - before)
    copied.synchronize()
    right_out = is_filled(sent, 7.0)

    source = staging.host_memory((_NUMBERS,), torch.float32).copy_(torch.full((_NUMBERS,), 3.0))
    kept, read = torch.zeros(_NUMBERS, device=bench.device), torch.zeros(_NUMBERS, device=bench.device)
    bench.delay(compute, DELAY)
    bench.copy(compute, tensor, kept)  # still reads the old content
    free = staging.here()
    before = bench.clock.now()
    staging.inwards(source, tensor, free)
    host = max(host, 1e3 * (bench.clock.now() - before))
    bench.copy(compute, tensor, read)
    done = bench.cuda.Event(enable_timing=False)
    done.record(compute)
    done.synchronize()
    return {
        "right_out": right_out,
        "right_in": is_filled(read, 3.0),
        "right_kept": is_filled(kept, 7.0),
        "host_milliseconds": host,
    }


def judge_copies(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_copies`."""
    (found,) = answers
    yield that("a copy to the host waits for the kernel that writes", found["right_out"], "old content")
    yield that("a kernel that reads waits for the copy from the host", found["right_in"], "old content")
    yield that("a copy from the host waits for kernels that still read", found["right_kept"], "new content")
    yield at_most(
        f"the host queues a copy behind a kernel of {DELAY:g} ms without waiting",
        found["host_milliseconds"],
        DELAY / 2,
        "ms",
    )


def is_filled(tensor: Tensor, value: float) -> bool:
    """Whether a 1-D tensor has one value everywhere; waits for the device."""
    return set(tensor.tolist()) == {value}


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError):
        return True
    return False


def measure_exit(place: Place) -> Any:
    """Leave a long kernel behind; the process ends with its answer, or not within the check's time."""
    bench = GpuBench(place.device)
    bench.delay(bench.cuda.current_stream(place.device), 1e3 * LEFT_BEHIND)
    return {"left_seconds": LEFT_BEHIND}


LEFT_BEHIND = 300.0
"""Seconds of the kernel that :func:`measure_exit` leaves behind: longer than the check may take."""


def judge_exit(options: ReportOptions, answers: Answers) -> Iterator[Line]:
    """The lines of :func:`measure_exit`; without an answer the check has failed already."""
    (found,) = answers
    yield informative(
        "a process ends although its GPU is busy", f"a kernel of {found['left_seconds']:g} s was left behind"
    )
