"""A fake GPU in slow motion: queued work runs only when the test, or a query of an event, advances it.

Streams queue all work, copies included; a stream that waits for an event stops until the event has passed.
So a missing synchronisation always gives wrong content, and not only now and then.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


class HostOfDevice:
    """A host's clock, 1000 s ahead of the device's; the device works while the host pauses."""

    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        self._idle = 0.0

    def now(self) -> float:
        return 1000.0 + self._cuda.milliseconds / 1e3 + self._idle

    def pause(self, seconds: float) -> None:
        if not self._cuda.advance():
            self._idle += 0.01


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within a ``with`` block, records everything with which this thread waits for the device.

    Every tensor counts as one of the device, except results of copies that do not block: these run only when
    the device gets to them, and hold NaN until then.

    Attributes
    ----------
    found
        Calls that block until the device has computed a tensor or passed an event.
    polled
        For each poll of an event that was not passed yet, the function that waited for it.
    """

    _METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")
    _OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero")

    def __init__(self, cuda: FakeCuda):
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._cuda = cuda
        self._thread = threading.get_ident()
        self._patch = pytest.MonkeyPatch()
        self._later: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self.found: list[str] = []
        self.polled: list[str] = []

    def __enter__(self) -> HostWaits:
        for name in self._METHODS:
            self._patch.setattr(torch.Tensor, name, self._watched(name, getattr(torch.Tensor, name)))
        self._patch.setattr(torch.Tensor, "to", self._watched_to(torch.Tensor.to))
        self._patch.setattr(torch.cuda, "synchronize", lambda *_: self.found.append("torch.cuda.synchronize"))
        self._patch.setattr(FakeEvent, "synchronize", lambda _: self.found.append("Event.synchronize"))
        self._patch.setattr(FakeEvent, "query", self._watched_query(FakeEvent.query))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own
        self._patch.undo()

    def _add(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self.found.append(what)

    def _watched(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.data_ptr() not in self._later:
                self._add(name)
            return plain(tensor, *args, **kwargs)

        return method

    def _watched_to(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args and args[0] == "cpu":  # the code under test says "cpu" only to read on the host
                self._add("to cpu")
            return plain(tensor, *args, **kwargs)

        return to

    def _watched_query(self, plain: Callable[[FakeEvent], bool]) -> Callable[[FakeEvent], bool]:
        def query(event: FakeEvent) -> bool:
            is_passed = plain(event)
            if not is_passed:
                caller = sys._getframe(1)
                while caller.f_code.co_name == "_wait_for_oldest":
                    assert caller.f_back is not None
                    caller = caller.f_back
                self.polled.append(caller.f_code.co_name)
            return is_passed

        return query

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name == "copy_" and ((len(args) > 2 and args[2]) or kwargs.get("non_blocking")):
            target, source = args[0], args[1].clone()
            target.fill_(float("nan"))
            self._later.add(target.data_ptr())
            self._kept.append(target)  # so that no other tensor gets its address

            def work() -> bool:
                with _disable_current_modes():
                    target.copy_(source)
                return True

            self._cuda.compute.queue.append(work)
            return target
        is_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        is_blocking_copy = name == "copy_" and not _called_by_torch()
        if name in self._OPERATORS or is_mask or is_blocking_copy:
            self._add(f"aten.{name}")
        return func(*args, **kwargs)


def _called_by_torch() -> bool:
    """Whether the operator that is being dispatched was called by a module of torch, on the device."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("_fn", "inner"):  # torch's wrappers of the method itself
        assert frame.f_back is not None
        frame = frame.f_back
    return f"{os.sep}torch{os.sep}" in frame.f_code.co_filename
