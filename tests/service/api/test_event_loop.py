"""Nothing whose size a client chooses keeps the event loop from answering: neither a callback of the loop,
nor a call of another thread that keeps the GIL.

Each is compared in CPU time of its thread, which does not depend on other processes, with the time in which
this process decodes and encodes some JSON. What is late once may have met a busy machine: it is measured
again, and only what is late every time fails.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from json.decoder import JSONDecoder
from json.encoder import JSONEncoder
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.largest_objects import SMALLEST, Amounts, Read, reads, store
from support.serving import DEADLINE, Service, Serving

LARGE = Amounts(features=16, microbatches=2_000, samples=20_000, rows=8, nodes=24)
MOST_UNITS = 1.5
ATTEMPTS = 3
MIB = 1024**2
LIMITS = {
    **{"max_body_bytes": 8 * MIB, "max_plan_bytes": 64 * MIB, "max_cells": 100_000},
    **{"max_searches_per_token": 10_000, "agent_timeout_seconds": 86_400.0},
}

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


async def test_no_read_and_no_write_of_the_largest_objects_keeps_the_loop(serving: Serving) -> None:
    def apart(make: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(client, make)

    # What this client does in its own thread is not the service's work.
    client = ThreadPoolExecutor(1, initializer=sys.setprofile, initargs=(None,))
    with client, watching_threads():
        async with serving("honest", **LIMITS) as service:
            reader = httpx.AsyncClient(
                transport=httpx.ASGITransport(without_bodies(service.app), raise_app_exceptions=False),
                base_url=service.http.base_url,
                timeout=DEADLINE,
            )
            async with reader:
                for each in reads(await store(service.http, SMALLEST)):
                    await read(reader, each)  # imports modules, and compiles templates and queries
                with without_garbage_collection():
                    late = []
                    for attempt in range(ATTEMPTS):
                        async with measured("storing") as work:
                            stored = await store(service.http, replace(LARGE, variant=attempt), apart)
                        if not (late := lateness(work)):
                            break
                    for each in reads(stored):
                        for _ in range(ATTEMPTS):
                            if not (again := lateness(await read(reader, each))):
                                break
                        late += again
    assert not late, f"longer than {MOST_UNITS:g} times JSON of {UNIT_BYTES} bytes: {late}"


async def test_json_in_another_thread_is_measured() -> None:
    text = json.dumps([1.5] * 2 * UNIT_BYTES)
    values = json.loads(text)
    with watching_threads():
        for make in (partial(json.loads, text), partial(json.dumps, values)):
            async with measured("JSON") as work:
                await asyncio.to_thread(make)
            assert lateness(work), make.func


async def read(http: httpx.AsyncClient, each: Read) -> Work:
    async with measured(each.path) as work:
        answer = await http.get(each.path, headers={"Accept": each.accept})
    assert answer.status_code < 400 or each.path.endswith("/trace"), (each, answer.status_code)
    return work


def lateness(work: Work) -> list[tuple[float, Work]]:
    """The work with its length in units, if it is too long."""
    length = units(max(work.callback, work.call), MOST_UNITS)
    return [(round(length, 2), work)] if length > MOST_UNITS else []


def without_bodies(app: ASGIApp) -> ASGIApp:
    """An application without the bodies of its answers, which its client would copy in this event loop."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def forward(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await app(scope, receive, forward)

    return answer


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collections take long in a large test process, and happen in any callback."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_every_route_that_reads_is_measured_long_lists_take_turns_and_short_requests_need_none(
    service: Service,
) -> None:
    app: FastAPI = service.app
    routes = [route for route in app.router.routes if isinstance(route, APIRoute)]
    paths = {route.path for route in routes if "GET" in (route.methods or ())}
    known = reads(await store(service.http, SMALLEST))
    assert {each.route for each in known} == paths, "add new routes to tests/support/largest_objects.py"
    lists = [each for each in known if is_long_list(each)]
    async with service.app.state.application.computations.listing(1_000):
        asked = (service.http.get(each.path, headers={"Accept": each.accept}) for each in lists)
        waiting = [*map(asyncio.create_task, asked)]
        for path in ("/healthz", "/v1/searches?limit=10", "/v1/runs?limit=10"):
            assert (await service.http.get(path)).status_code == 200
        await asyncio.sleep(0.1)
        assert [each.path for each, task in zip(lists, waiting, strict=True) if task.done()] == []
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


def is_long_list(each: Read) -> bool:
    return each.accept != "text/event-stream" and ("limit=" in each.path or each.path.endswith("/events"))
