"""Posted receives of :mod:`zbv_worker.transport.gloo`, one class per path of the tensor.

A write to a buffer must run after the work that was queued on the compute stream when the receive was posted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from zbv_worker.transport.staging import Staging
from zbv_worker.transport.torch_api import CudaEvent
from zbv_worker.transport.torch_errors import classified


@lru_cache(maxsize=16)
def _patience(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class ReceiveWork(Protocol):
    """The part of gloo's Work that receives use."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until it arrived."""


# Not frozen: one is created per received tensor, and freezing doubles the cost of that.
@dataclass(eq=False, slots=True)
class HostReceive:
    """gloo into CPU memory."""

    work: ReceiveWork
    buffer: Tensor

    def wait(self, timeout: float) -> Tensor:
        """Wait until the tensor arrived."""
        try:
            self.work.wait(_patience(timeout))
        except RuntimeError as error:
            raise classified(error, "receive") from error
        return self.buffer

    on_stream = wait


@dataclass(frozen=True, eq=False, slots=True)
class StagedReceive:
    """gloo into pinned memory, then a copy to the GPU."""

    work: ReceiveWork
    arrived: Tensor
    buffer: Tensor
    free: CudaEvent
    """The event after which the buffer may be overwritten."""
    staging: Staging

    def wait(self, timeout: float) -> Tensor:
        """Wait until the tensor is on the GPU."""
        self._copied(timeout).synchronize()
        return self.buffer

    def on_stream(self, timeout: float) -> Tensor:
        """Wait on the host until it arrived, and make the current stream wait for the copy to the GPU."""
        self._copied(timeout)
        return self.buffer

    def _copied(self, timeout: float) -> CudaEvent:
        HostReceive(self.work, self.arrived).wait(timeout)
        return self.staging.inwards(self.arrived, self.buffer, self.free)
