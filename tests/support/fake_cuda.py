"""A fake GPU in slow motion: queued work runs only when the test, or a query of an event, advances it.

Streams queue all work, copies included; a stream that waits for an event stops until the event has passed.
So a missing synchronisation always gives wrong content, and not only now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], bool]
"""Runs and returns True, or returns False when it cannot yet."""


class FakeStream:
    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        self.queue: deque[Work] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        passes, needed = event.passes, event.recorded
        self.queue.append(lambda: len(passes) >= needed)

    def compute(self, milliseconds: float) -> None:
        """Queue work that takes some time."""

        def work() -> bool:
            self._cuda.milliseconds += milliseconds
            return True

        self.queue.append(work)

    def hang(self) -> Callable[[], None]:
        """Queue work that ends when the test calls the returned function."""
        ended: list[bool] = []
        self.queue.append(lambda: bool(ended))
        return lambda: ended.append(True)

    def advance(self) -> bool:
        """One piece of work, if it can run."""
        if self.queue and self.queue[0]():
            self.queue.popleft()
            return True
        return False


class FakeEvent:
    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        self.recorded = 0
        self.passes: list[float] = []

    def record(self, stream: FakeStream) -> None:
        self.recorded += 1

        def work() -> bool:
            self.passes.append(self._cuda.milliseconds)
            return True

        stream.queue.append(work)

    def query(self) -> bool:
        self._cuda.advance()
        return self.is_passed

    @property
    def is_passed(self) -> bool:
        return len(self.passes) >= self.recorded

    def synchronize(self) -> None:
        self._cuda.settle()
        if not self.is_passed:
            raise RuntimeError("the host would wait forever")

    def elapsed_time(self, later: FakeEvent) -> float:
        if not (self.is_passed and later.is_passed):
            raise RuntimeError("an event was not passed yet")
        return later.passes[-1] - self.passes[-1]


class FakeCuda:
    """In place of ``torch.cuda``. Asking an event makes one piece of work happen on every stream."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.free_bytes = 2**30
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.compute = self.Stream()

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def Stream(self, device: object = None) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def current_stream(self, device: object) -> FakeStream:
        return self.compute

    def stream(self, stream: FakeStream) -> AbstractContextManager[Any]:
        return _CopiesLater(stream)

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free_bytes, 2**30

    def advance(self) -> bool:
        """One piece of work on every stream that can go on; whether there was any."""
        went_on = [stream.advance() for stream in self.streams]
        return any(went_on)

    def settle(self) -> None:
        """All work that can run."""
        while self.advance():
            pass


class _CopiesLater(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Queues copies on a stream instead of making them."""

    def __init__(self, stream: FakeStream):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))

        def work() -> bool:
            func(*args, **(kwargs or {}))
            return True

        self._stream.queue.append(work)
        return args[0]
