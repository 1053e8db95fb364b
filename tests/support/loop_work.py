"""Measures what keeps the event loop from answering: its callbacks, and calls of threads that keep the GIL.

CPU time of a thread does not depend on other processes, so it can be compared with a unit that is measured
in the same process: the time in which JSON of some size is decoded.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from json.decoder import JSONDecoder
from json.encoder import JSONEncoder
from typing import Any

RELEASING = ("zlib", "_sqlite3", "sqlite3", "_hashlib", "_socket", "select", "time", "_thread", "posix")
"""Modules whose calls release the GIL while they work."""
UNIT_BYTES = 128 * 1024
UNSEEN = (JSONDecoder.raw_decode.__code__, JSONEncoder.iterencode.__code__)
"""Functions that count as calls of C code: they call some whose calls are no events of a profile."""
SHORT_SECONDS = 0.0002
"""Calls are measured with this error; shorter ones are not."""
_RUN = asyncio.events.Handle._run


@dataclass
class Work:
    """The longest callback of the event loop, and the longest call of another thread, in seconds of CPU."""

    what: str = ""
    callback: float = 0.0
    callback_name: str = ""
    call: float = 0.0
    call_name: str = ""

    @property
    def longest(self) -> float:
        """The longer one of both."""
        return max(self.callback, self.call)


_current = Work()


_units: list[float] = []


def units(seconds: float, most: float) -> float:
    """How many units a time is: the CPU seconds to decode and encode JSON of :data:`UNIT_BYTES`, at best.

    If that is too many of the shortest units measured so far, the unit is measured now, at the same load.
    """
    if not _units or seconds > most * min(_units):
        _units.append(_unit())
        return seconds / _units[-1]
    return seconds / min(_units)


def _unit() -> float:
    text = json.dumps([1.5] * (UNIT_BYTES // 5))
    taken = []
    for _ in range(5):
        begin = time.thread_time()
        json.dumps(json.loads(text))
        taken.append(time.thread_time() - begin)
    return min(taken)


@contextmanager
def watching_threads() -> Iterator[None]:
    """Within the block, measure the calls of threads that start in it."""
    threading.setprofile(_profile)
    try:
        yield
    finally:
        threading.setprofile(None)


@asynccontextmanager
async def measured(what: str) -> AsyncIterator[Work]:
    """Measure the work within the block, without that of the caller before and after it."""
    global _current
    _current = work = Work(what)
    asyncio.events.Handle._run = _measured_run  # type: ignore[method-assign,assignment]
    try:
        await asyncio.sleep(0)
        yield work
        await asyncio.sleep(0)
    finally:
        _current = Work()
        asyncio.events.Handle._run = _RUN  # type: ignore[method-assign]


def _measured_run(handle: asyncio.Handle) -> None:
    work, begin = _current, time.thread_time()
    _RUN(handle)
    taken = time.thread_time() - begin
    if taken > work.callback and work is _current:
        work.callback, work.callback_name = taken, repr(handle)[:300]


class _Begun(threading.local):
    """The last call of this thread, and when its CPU time was read."""

    at = math.inf
    read_at = -math.inf
    cpu = 0.0


_begun = _Begun()


def _profile(frame: Any, happened: str, function: Any) -> None:
    """Read the CPU time, which takes long, only about calls that are long by the clock on the wall."""
    if frame.f_code in UNSEEN and happened in ("call", "return"):
        happened, function = f"c_{happened}", frame.f_code
    if happened == "c_call":
        _begun.at = now = time.perf_counter()
        if now - _begun.read_at > SHORT_SECONDS:
            _begun.read_at, _begun.cpu = now, time.thread_time()
    elif happened in ("c_return", "c_exception"):
        if time.perf_counter() - _begun.at < max(SHORT_SECONDS, _current.call):
            return
        taken = time.thread_time() - _begun.cpu
        if taken > _current.call and _module_of(function) not in RELEASING:
            _current.call, _current.call_name = taken, f"{function!r} in {frame.f_code.co_qualname}"[:300]


def _module_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__module__", None) or type(owner).__module__
    return str(name).partition(".")[0]
