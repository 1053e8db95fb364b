"""Actions are timed by the device that runs them."""

from __future__ import annotations

import time

import torch
from support.fake_cuda import FakeCuda
from zbv_worker.measure.profile.stopwatch import EventStopwatch, HostStopwatch, stopwatch


def test_on_a_gpu_the_stream_is_timed_and_not_the_queueing() -> None:
    cuda, device = FakeCuda(), torch.device("cpu")
    watch = EventStopwatch(device, cuda)
    stream = cuda.current_stream(device)
    times = [watch.time(lambda ms=ms: stream.compute(ms)) for ms in (3.0, 5.0)]  # type: ignore[misc]
    assert cuda.milliseconds == 0  # nothing was waited for
    watch.settle()
    assert [seconds() for seconds in times] == [0.003, 0.005]


def test_on_a_cpu_it_is_the_hosts_clock() -> None:
    watch = stopwatch(torch.device("cpu"))
    assert isinstance(watch, HostStopwatch)
    before = time.perf_counter()
    seconds = watch.time(lambda: time.sleep(0.002))()
    watch.settle()
    assert 0.002 <= seconds <= time.perf_counter() - before
