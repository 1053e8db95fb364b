"""Protocols of the part of ``torch.cuda`` in use, so that stream and event logic runs without a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch


class CudaStream(Protocol):
    """An ordered queue of device work."""

    def wait_event(self, event: Any) -> None:
        """Make work queued from now on wait for the event."""


class CudaEvent(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Mark the current end of the stream's queue."""

    def query(self) -> bool:
        """Whether the stream has passed the event."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed the event."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to a later event; the streams must have passed both."""


class CudaApi(Protocol):
    """The functions of ``torch.cuda`` that the worker calls."""

    def Event(self, *, enable_timing: bool) -> CudaEvent:
        """A new event."""

    def Stream(self, device: torch.device) -> CudaStream:
        """A new stream."""

    def current_stream(self, device: torch.device) -> CudaStream:
        """The stream that this thread queues on."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread queues on another stream."""


def torch_cuda() -> CudaApi:
    """``torch.cuda`` itself."""
    return cast(CudaApi, torch.cuda)
