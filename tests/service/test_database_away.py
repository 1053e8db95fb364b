"""A PostgreSQL server that goes and comes back: the service stays, says so, and loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.databases import PostgresDatabases
from support.postgres import Server, a_server
from support.serving import DEADLINE, Serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[Server]:
    with a_server() as started:
        yield started


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not await holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.05)


async def test_a_service_outlives_its_database(server: Server, serving: Serving, directory: Path) -> None:
    with PostgresDatabases(server.url).migrated() as url:
        async with serving("held", database=url) as service:
            search_id = (await service.submit()).json()["id"]
            await service.until(search_id, lambda found: found["objective"] is not None)

            await asyncio.to_thread(server.stop)
            (directory / "release").touch()  # it ends while nobody can store its plan
            for answer in (await service.http.get(f"/v1/searches/{search_id}"), await service.submit(seed=1)):
                assert (answer.status_code, answer.json()["type"]) == (503, "/problems/not-ready")
                assert int(answer.headers["Retry-After"]) >= 1
            assert (await service.http.get("/readyz")).status_code == 503
            assert (await service.http.get("/healthz")).status_code == 200

            await asyncio.to_thread(server.start)

            async def is_ready() -> bool:
                return (await service.http.get("/readyz")).status_code == 200

            await until(is_ready, "readiness")
            ended = await service.ended(search_id)
            assert (ended["state"], ended["attempts"]) == ("done", 1)
            later = (await service.submit(seed=2)).json()["id"]
            assert (await service.ended(later))["state"] == "done"
