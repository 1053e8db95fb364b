"""A PostgreSQL server that stops and returns: the service keeps running, reports it, and loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.databases import PostgresDatabases
from support.malformed import PLAN
from support.postgres import Server, a_server
from support.serving import DEADLINE, Serving
from support.tokens import add, bearer
from zbv_service.security.tokens import TokenText


@pytest.fixture
def server() -> Iterator[Server]:
    with a_server() as started:
        yield started


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not await holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.05)


async def test_a_service_survives_a_restart_of_its_database(
    server: Server, serving: Serving, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with PostgresDatabases(server.url).migrated() as url:
        async with serving("held", database=url, auth="tokens") as service:
            service.http.headers.update(await add(service, "admin"))
            imported = await service.http.post("/v1/plans", json=PLAN)
            rank = f"/v1/plans/{imported.json()['plan_id']}/ranks/0"
            assert (await service.http.get(rank)).status_code == 200
            search_id = await service.begun()

            await asyncio.to_thread(server.stop)
            (directory / "release").touch()  # it ends while its plan cannot be stored
            for answer in (await service.http.get(f"/v1/searches/{search_id}"), await service.submit(seed=1)):
                assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
                assert int(answer.headers["Retry-After"]) >= 1
            # Cached plans are served to known tokens; other tokens get no access.
            assert (await service.http.get(rank)).status_code == 200
            unknown = await service.http.get(rank, headers=bearer(str(TokenText.new())))
            assert (unknown.status_code, unknown.json()["type"]) == (503, "/errors/not-ready")
            with caplog.at_level("INFO"):
                for _ in range(3):
                    assert (await service.http.get("/readyz")).status_code == 503
            assert (await service.http.get("/healthz")).status_code == 200
            (said,) = [line for line in caplog.records if "not ready" in line.getMessage()]
            assert "database" in said.getMessage()
            assert said.exc_info is None

            await asyncio.to_thread(server.start)

            async def is_ready() -> bool:
                return (await service.http.get("/readyz")).status_code == 200

            with caplog.at_level("INFO"):
                await until(is_ready, "readiness")
            assert any("ready again" in line.getMessage() for line in caplog.records)
            ended = await service.ended(search_id)
            assert (ended["state"], ended["attempts"]) == ("done", 1)
            later = (await service.submit(seed=2)).json()["id"]
            assert (await service.ended(later))["state"] == "done"
