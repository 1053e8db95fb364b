"""Times actions: by the host's clock on a CPU, by events on the compute stream on a GPU.

On a GPU the host only queues work. Waiting for the device before and after every action would include the
queueing, which a run hides by queueing ahead; events time only the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zbv_worker.transport.torch_api import CudaApi, torch_cuda

Seconds = Callable[[], float]
"""Returns how long something took, after the stopwatch's ``settle``."""

_MILLI = 1e-3


def stopwatch(device: torch.device) -> EventStopwatch | HostStopwatch:
    """The stopwatch for a device."""
    return EventStopwatch(device) if device.type == "cuda" else HostStopwatch()


class HostStopwatch:
    """Times by the host's clock."""

    def time(self, work: Callable[[], object]) -> Seconds:
        """Run work."""
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        return lambda: seconds

    def settle(self) -> None:
        """Nothing to wait for."""


class EventStopwatch:
    """Times by events around queued work."""

    def __init__(self, device: torch.device, cuda: CudaApi | None = None):
        self._cuda = cuda or torch_cuda()
        self._stream = self._cuda.current_stream(device)

    def time(self, work: Callable[[], object]) -> Seconds:
        """Queue work."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        work()
        end.record(self._stream)
        return lambda: start.elapsed_time(end) * _MILLI

    def settle(self) -> None:
        """Wait for the stream."""
        last = self._cuda.Event(enable_timing=False)
        last.record(self._stream)
        last.synchronize()
