"""Posted receives of :mod:`zbv_worker.transport.distributed`, one class per way of the tensor.

Whatever writes a buffer is ordered behind the compute stream as it was when the receive was posted. NCCL sees
to that itself: its operations begin behind the stream that is current when they are issued.
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
    """What is asked of torch's Work."""

    def wait(self, timeout: timedelta = ...) -> object:
        """gloo: until it arrived. NCCL, without a timeout: order the current stream behind it."""

    def is_completed(self) -> bool:
        """NCCL: whether it arrived. gloo says so only to those who have waited."""


# Not frozen: one is made for every tensor that arrives, and freezing doubles what that costs.
@dataclass(eq=False, slots=True)
class HostReceive:
    """gloo, into CPU memory."""

    work: ReceiveWork
    buffer: Tensor

    def wait(self, timeout: float) -> Tensor:
        """Wait until it arrived."""
        try:
            self.work.wait(_patience(timeout))
        except RuntimeError as error:
            raise classified(error, "receive") from error
        return self.buffer

    on_stream = wait


@dataclass(frozen=True, eq=False, slots=True)
class StreamReceive:
    """NCCL, into GPU memory."""

    work: ReceiveWork
    buffer: Tensor

    def wait(self, timeout: float) -> Tensor:
        """Wait on the host. Not with NCCL's own timeout: that one takes the process down."""
        deadline = time.monotonic() + timeout
        while not self.work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError("nothing arrived")
            time.sleep(_POLL_SECONDS)
        return self.on_stream(timeout)

    def on_stream(self, timeout: float) -> Tensor:
        """Order the current stream behind it; nothing waits here, so nothing times out here."""
        try:
            self.work.wait()  # with a timeout it would wait on the host
        except RuntimeError as error:
            raise classified(error, "receive") from error
        return self.buffer


@dataclass(frozen=True, eq=False, slots=True)
class StagedReceive:
    """gloo, into pinned memory, and from there to the GPU.

    Attributes
    ----------
    free
        From when on the buffer may be written to.
    """

    work: ReceiveWork
    arrived: Tensor
    buffer: Tensor
    free: CudaEvent
    staging: Staging

    def wait(self, timeout: float) -> Tensor:
        """Wait until it is on the GPU."""
        self._copied(timeout).synchronize()
        return self.buffer

    def on_stream(self, timeout: float) -> Tensor:
        """Wait on the host until it is there, and order the current stream behind the copy to the GPU."""
        self._copied(timeout)
        return self.buffer

    def _copied(self, timeout: float) -> CudaEvent:
        HostReceive(self.work, self.arrived).wait(timeout)
        return self.staging.inwards(self.arrived, self.buffer, self.free)
