"""gloo for CUDA tensors: gloo moves CPU memory only, so tensors pass through pinned host memory.

The copies use their own streams, ordered by events, and overlap with compute. The copy of a sent tensor waits
for the kernel that computes it. The copy of a received tensor waits only for kernels that were queued when
its receive was posted, because they may still read the buffer's old content.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbv_worker.transport.torch_api import CudaApi, CudaEvent, torch_cuda


class Staging:
    """The copies between one rank's GPU and host.

    Parameters
    ----------
    device
        Where the rank computes.
    pin
        Use pinned host memory; copies from or to pageable memory block the host. torch reuses a pinned block
        only after the copies queued on it are complete.
    """

    def __init__(self, device: torch.device, cuda: CudaApi | None = None, *, pin: bool = True):
        self._device = device
        self._cuda = cuda if cuda is not None else torch_cuda()
        self._pin = pin
        self._outwards = self._cuda.Stream(device)
        self._inwards = self._cuda.Stream(device)

    def host_memory(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A host tensor for one copy."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pin)

    def here(self) -> CudaEvent:
        """An event at the current end of the compute stream's queue."""
        return self._marked(self._cuda.current_stream(self._device))

    def outwards(self, tensor: Tensor) -> tuple[Tensor, CudaEvent]:
        """Queue a copy to the host; returns the host tensor and the event of its completion.

        The caller must keep the tensor alive until then.
        """
        ready = self.here()
        target = self.host_memory(tensor.shape, tensor.dtype)
        self._outwards.wait_event(ready)
        with self._cuda.stream(self._outwards):
            target.copy_(tensor, non_blocking=True)
        return target, self._marked(self._outwards)

    def inwards(self, source: Tensor, target: Tensor, free: CudaEvent) -> CudaEvent:
        """Queue a copy to the device and make the compute stream wait for it; returns its completion event.

        Parameters
        ----------
        free
            The event after which the target may be overwritten.
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
