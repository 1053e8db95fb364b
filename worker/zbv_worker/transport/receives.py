"""Posted receives of :mod:`zbv_worker.transport.distributed`, one class per path of the tensor.

A write to a buffer must run after the work that was queued on the compute stream when the receive was posted.
NCCL ensures that itself: its operations run after the stream that is current when they are issued.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from zbv_worker.transport.cuda_api import CudaEvent
from zbv_worker.transport.staging import Staging
from zbv_worker.transport.torch_errors import classified

_POLL_SECONDS = 0.00005


@lru_cache(maxsize=16)
def _patience(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class ReceiveWork(Protocol):
    """The part of torch's Work that receives use."""

    def wait(self, timeout: timedelta = ...) -> object:
        """gloo: wait until it arrived. NCCL, without a timeout: make the current stream wait for it."""

    def is_completed(self) -> bool:
        """NCCL: whether it arrived. gloo reports that only after a wait."""


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
class StreamReceive:
    """NCCL into GPU memory."""

    work: ReceiveWork
    buffer: Tensor

    def wait(self, timeout: float) -> Tensor:
        """Wait on the host, without NCCL's own timeout, which would end the process."""
        deadline = time.monotonic() + timeout
        while not self.work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError("nothing arrived")
            time.sleep(_POLL_SECONDS)
        return self.on_stream(timeout)

    def on_stream(self, timeout: float) -> Tensor:
        """Make the current stream wait for the tensor; the host does not wait, so nothing times out here."""
        try:
            self.work.wait()  # with a timeout it would block the host
        except RuntimeError as error:
            raise classified(error, "receive") from error
        return self.buffer


@dataclass(frozen=True, eq=False, slots=True)
class StagedReceive:
    """gloo into pinned memory, then a copy to the GPU.

    Attributes
    ----------
    free
        The event after which the buffer may be overwritten.
    """

    work: ReceiveWork
    arrived: Tensor
    buffer: Tensor
    free: CudaEvent
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
