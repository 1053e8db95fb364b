"""Nothing whose size a client chooses keeps the event loop from answering: neither a callback of the loop,
nor a call of another thread that keeps the GIL.

Each is compared with the time in which this process decodes and encodes some JSON.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from support.loop_work import UNIT_BYTES, Work, measured, unit, watching_threads
from support.serving import Service, Serving

from benchmarks.service.largest import SMALLEST, Amounts, Read, Stored, reads, store

pytestmark = pytest.mark.anyio

LARGE = Amounts(features=16, microbatches=10_000, samples=20_000, rows=40, nodes=64)
MOST_UNITS = 3.0
MIB = 1024**2
LIMITS = {
    "max_body_bytes": 8 * MIB,
    "max_plan_bytes": 64 * MIB,
    "max_cells": 100_000,
    "max_searches_per_token": 10_000,
    "agent_timeout_seconds": 86_400.0,
}


async def read(service: Service, each: Read) -> Work:
    async with measured() as work:
        answer = await service.http.get(each.path, headers={"Accept": each.accept})
    assert answer.status_code < 400 or each.path.endswith("/trace"), (each, answer.text[:500])
    return work


async def test_no_read_and_no_write_of_the_largest_objects_keeps_the_loop(
    serving: Serving, any_database_url: str
) -> None:
    def apart(make: Callable[[], bytes]) -> Awaitable[bytes]:
        return asyncio.get_running_loop().run_in_executor(client, make)

    # What this client does in its own thread is not the service's work.
    client = ThreadPoolExecutor(1, initializer=sys.setprofile, initargs=(None,))
    with client, watching_threads():
        async with serving("honest", database=any_database_url, **LIMITS) as service:
            for each in reads(await store(service.http, SMALLEST)):
                await read(service, each)  # imports modules, and compiles templates and queries
            with without_garbage_collection():
                async with measured() as writing:
                    stored = await store(service.http, LARGE)
                found = {"writing": writing}
                found |= {each.path: await read(service, each) for each in reads(stored)}
                most = MOST_UNITS * unit()
    late = {path: work for path, work in found.items() if max(work.callback, work.call) > most}
    assert not late, f"longer than {MOST_UNITS:g} times JSON of {UNIT_BYTES} bytes, {most:.3f} s: {late}"


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collections take long in a large test process, and happen in any callback."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_every_route_that_reads_is_measured(serving: Serving) -> None:
    async with serving("immediate") as service:
        app: FastAPI = service.app
        routes = [route for route in app.router.routes if isinstance(route, APIRoute)]
        paths = {route.path for route in routes if "GET" in (route.methods or ())}
    some = Stored("s", "p", "l", "r", "f", "a", "w")
    assert {each.route for each in reads(some)} == paths, "add new routes to benchmarks/service/largest.py"
