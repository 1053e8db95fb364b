"""What is used of ``torch.cuda``, by shape: the logic of streams and events can then be run without a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch


class CudaStream(Protocol):
    """Device work in order."""

    def wait_event(self, event: Any) -> None:
        """Whatever is queued from now on runs after the event."""


class CudaEvent(Protocol):
    """A point in a stream."""

    def record(self, stream: Any) -> None:
        """Be the point that the stream's queue ends at now."""

    def query(self) -> bool:
        """Whether the stream has come past it."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds to another event; both must have been passed."""


class CudaApi(Protocol):
    """The part of ``torch.cuda`` that is used."""

    def Event(self, *, enable_timing: bool) -> CudaEvent:
        """A new event."""

    def Stream(self, device: torch.device) -> CudaStream:
        """A new stream."""

    def current_stream(self, device: torch.device) -> CudaStream:
        """The stream on which this thread computes."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, this thread queues on another stream."""


def torch_cuda() -> CudaApi:
    """``torch.cuda`` itself."""
    return cast(CudaApi, torch.cuda)
