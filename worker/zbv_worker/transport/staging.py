"""gloo for CUDA tensors: it moves CPU memory only, so tensors go through pinned memory on the way.

The copies run on streams of their own, ordered by events, and overlap compute: one of a tensor that is sent
waits for the kernel that makes it, one of a tensor that arrived for nothing but the kernels that were queued
when its receive was posted (they may still read what was in the buffer before).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbv_worker.transport.cuda_api import CudaApi, CudaEvent, torch_cuda


class Staging:
    """The two copies of one rank.

    Parameters
    ----------
    device
        Where the rank computes.
    pin
        Pinned host memory, without which a copy holds up the host. torch gives a pinned block to another only
        when the copies that were queued on it are done.
    """

    def __init__(self, device: torch.device, cuda: CudaApi | None = None, *, pin: bool = True):
        self._device = device
        self._cuda = cuda if cuda is not None else torch_cuda()
        self._pin = pin
        self._outwards = self._cuda.Stream(device)
        self._inwards = self._cuda.Stream(device)

    def host_memory(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A host tensor for one copy."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin)

    def here(self) -> CudaEvent:
        """The point that the compute stream's queue ends at now."""
        return self._marked(self._cuda.current_stream(self._device))

    def outwards(self, tensor: Tensor) -> tuple[Tensor, CudaEvent]:
        """Queue a copy to the host: the host tensor, and when it has the content.

        The tensor must be kept alive until then.
        """
        ready = self.here()
        target = self.host_memory(tensor.shape, tensor.dtype)
        self._outwards.wait_event(ready)
        with self._cuda.stream(self._outwards):
            target.copy_(tensor, non_blocking=True)
        return target, self._marked(self._outwards)

    def inwards(self, source: Tensor, target: Tensor, free: CudaEvent) -> CudaEvent:
        """Queue a copy to the device, and the compute stream behind it; the event is that of the copy's end.

        Parameters
        ----------
        free
            From when on the target may be written to.
        """
        self._inwards.wait_event(free)
        with self._cuda.stream(self._inwards):
            target.copy_(source, non_blocking=True)
        arrived = self._marked(self._inwards)
        self._cuda.current_stream(self._device).wait_event(arrived)
        return arrived

    def _marked(self, stream: object) -> CudaEvent:
        event = self._cuda.Event(enable_timing=False)
        event.record(stream)
        return event
