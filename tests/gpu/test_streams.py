"""CUDA's streams, events and copies: what the executor's order of work and the times in traces rest on."""

from __future__ import annotations

import torch
from support.on_devices import Bench, Run, is_filled
from zbv_solver.plans.orders import Action
from zbv_worker.execution.timeline import CudaTimeline, Record

DELAY = 50.0
"""Milliseconds of a kernel that only takes time."""
STREAMS = 16
"""More streams than the hardware queues of CUDA's default, 8."""
MARKS = 20
CLOCK_LIMIT = 200e-6
"""Seconds: short against an action, and long against the host's noticing of an event."""
NUMBERS = 1 << 18
REPORT = "Report the versions of torch, CUDA and the driver; do not trust traces of this machine."


def refuses(call: object, *arguments: object) -> bool:
    """Whether a call raises an error."""
    try:
        call(*arguments)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        return True
    return False


def events_pass_in_order(here: Bench) -> None:
    cuda, device = here.gpu.cuda, here.gpu.device
    first, second = cuda.Stream(device), cuda.Stream(device)
    begin, end, after = (cuda.Event(enable_timing=True) for _ in range(3))
    begin.record(first)
    here.delay(first, DELAY)
    end.record(first)
    second.wait_event(end)
    after.record(second)
    assert not after.query(), f"a stream that waits for an event ran on. {REPORT}"
    assert refuses(begin.elapsed_time, after), f"elapsed_time of an event that has not passed. {REPORT}"
    after.synchronize()
    assert end.query(), f"an event passed before the one that its stream waited for. {REPORT}"
    assert end.elapsed_time(after) >= 0, (
        f"an event passed before the one that its stream waited for. {REPORT}"
    )
    measured = begin.elapsed_time(end)
    assert abs(measured / DELAY - 1) <= 0.2, f"a kernel of {DELAY:g} ms took {measured:.1f} ms. {REPORT}"
    unrecorded = cuda.Event(enable_timing=True)
    assert unrecorded.query(), f"query() of an unrecorded event is False. {REPORT}"
    assert refuses(begin.elapsed_time, unrecorded), f"elapsed_time of an unrecorded event. {REPORT}"
    untimed = cuda.Event(enable_timing=False)
    untimed.record(first)
    untimed.synchronize()
    assert refuses(untimed.elapsed_time, end), f"elapsed_time of an event without timing. {REPORT}"


def test_events_pass_in_the_order_of_their_streams(run: Run) -> None:
    """Events and streams behave as the tests' models of CUDA: order, times, and refusals."""
    run(events_pass_in_order)


def streams_pass_a_busy_one(here: Bench) -> None:
    cuda, device = here.gpu.cuda, here.gpu.device
    begin = cuda.Event(enable_timing=True)
    begin.record(cuda.current_stream(device))
    others, busy = [cuda.Stream(device) for _ in range(STREAMS)], cuda.Stream(device)
    ends = [cuda.Event(enable_timing=True) for _ in others]
    for _ in range(2):  # the second waits at the head of a hardware queue, and blocks those that share it
        here.delay(busy, DELAY / 2)
    for stream, end in zip(others, ends, strict=True):
        stream.wait_event(begin)
        end.record(stream)
    for end in ends:
        end.synchronize()
    passed = sum(begin.elapsed_time(end) < DELAY / 4 for end in ends)
    assert passed == STREAMS, (
        f"only {passed} of {STREAMS} streams ended their work while another stream was busy, so streams "
        f"share a hardware queue. Set CUDA_DEVICE_MAX_CONNECTIONS=32 where processes start."
    )


def test_streams_do_not_wait_for_a_busy_one(run: Run) -> None:
    """Streams do not block each other; a receive that waits would otherwise stop compute."""
    run(streams_pass_a_busy_one)


def marks_lie_where_the_host_saw_them(here: Bench) -> None:
    cuda, device, clock = here.gpu.cuda, here.gpu.device, here.gpu.clock
    timeline = CudaTimeline(device, clock, cuda=cuda)
    timeline.begin()
    queued, seen, records = [], [], []
    for index in range(MARKS):
        queued.append(clock.now())
        mark = timeline.mark()
        mark.synchronize()
        seen.append(clock.now())
        records.append(Record(Action(0, "F", index), mark, mark, mark))
        here.delay(cuda.current_stream(device), 1.0)
    ends = [record.end / 1e9 for record in timeline.resolved(records, queued)]
    error = max(max(before - end, end - after) for before, after, end in zip(queued, seen, ends, strict=True))
    assert error <= CLOCK_LIMIT, (
        f"a mark lies {error * 1e6:.0f} us outside of the time in which the host saw it pass. Close other "
        f"work on the host and the GPU, then repeat."
    )


def test_events_are_on_the_hosts_clock(run: Run) -> None:
    """Times of different ranks can be compared to a fraction of a millisecond."""
    run(marks_lie_where_the_host_saw_them)


def copies_neither_overtake_nor_wait(here: Bench) -> None:
    cuda, device, clock, staging = here.gpu.cuda, here.gpu.device, here.gpu.clock, here.staging()
    compute = cuda.current_stream(device)
    tensor = torch.zeros(NUMBERS, device=device)
    here.delay(compute, DELAY)
    tensor.fill_(7.0)
    before = clock.now()
    sent, copied = staging.outwards(tensor)
    outwards = clock.now() - before
    copied.synchronize()
    assert is_filled(sent, 7.0), "a copy to the host overtook the kernel that writes. Use --backend nccl."

    source = staging.host_memory((NUMBERS,), torch.float32).copy_(torch.full((NUMBERS,), 3.0))
    kept, read = torch.zeros(NUMBERS, device=device), torch.zeros(NUMBERS, device=device)
    here.delay(compute, DELAY)
    kept.copy_(tensor)  # still reads the old content
    free = staging.here()
    before = clock.now()
    staging.inwards(source, tensor, free)
    inwards = clock.now() - before
    read.copy_(tensor)
    done = cuda.Event(enable_timing=False)
    done.record(compute)
    done.synchronize()
    assert is_filled(read, 3.0), "a kernel overtook the copy from the host. Use --backend nccl."
    assert is_filled(kept, 7.0), "a copy from the host overtook a kernel that reads. Use --backend nccl."
    assert max(outwards, inwards) < DELAY / 2e3, (
        "the host waited for a kernel when it queued a copy. Check that memory can be pinned (ulimit -l)."
    )


def test_copies_through_pinned_memory_neither_overtake_kernels_nor_stop_the_host(run: Run) -> None:
    """Transfers over gloo, and the data of the first stage, are ordered with compute by events alone."""
    run(copies_neither_overtake_nor_wait)


def leaves_a_kernel_behind(here: Bench) -> None:
    here.delay(here.gpu.cuda.current_stream(here.gpu.device), 600e3)  # longer than a process may take


def test_a_process_ends_although_its_kernel_does_not(run: Run) -> None:
    """A rank that fails can leave its node although its kernels never end. If not, update the driver."""
    run(leaves_a_kernel_behind)
