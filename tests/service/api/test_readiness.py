"""``/readyz`` costs almost nothing, at any rate of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import event
from support.serving import Service, Serving, until
from zbv_service.api import readiness
from zbv_service.database import Database, DatabaseAway


async def test_concurrent_requests_share_one_ping(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pings = 0
    go_on = asyncio.Event()

    async def ping(_self: Database) -> None:
        nonlocal pings
        pings += 1
        await go_on.wait()

    monkeypatch.setattr(Database, "ping", ping)
    async with serving("honest") as service:
        asked = [asyncio.create_task(service.http.get("/readyz")) for _ in range(50)]
        await until(lambda: pings > 0, "the database is pinged")
        asked[0].cancel()  # the first request is cancelled, and the others continue
        go_on.set()
        answers = await asyncio.gather(*asked[1:])
        assert {answer.status_code for answer in answers} == {200}
        assert (await service.http.get("/readyz")).status_code == 200
        assert pings == 1


async def test_the_result_of_a_ping_expires(honest: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await honest.http.get("/readyz")).status_code == 200

    async def away(_self: Database) -> None:
        raise DatabaseAway("The database does not answer.")

    monkeypatch.setattr(Database, "ping", away)
    assert (await honest.http.get("/readyz")).status_code == 200
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    application = honest.app.state.application
    application.readiness._fresh_until = 0.0
    assert (await honest.http.get("/readyz")).status_code == 503
    assert (await honest.http.get("/readyz")).status_code == 503


async def test_a_database_that_cannot_be_written_is_not_ready_although_it_can_be_read(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    async with serving("honest") as service:
        engine = service.app.state.application.database._engine.sync_engine
        pragma = ["ON"]

        def refuse_writes(connection: Any, *_: object) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA query_only={pragma[0]}")
            cursor.close()

        event.listen(engine, "checkout", refuse_writes)
        assert (await service.submit()).status_code == 503
        answer = await service.http.get("/readyz")
        assert answer.status_code == 503
        assert [error["check"] for error in answer.json()["errors"]] == ["database"]
        assert "cannot be written" in answer.json()["detail"]
        assert (await service.http.get("/v1/searches")).status_code == 200
        pragma[0] = "OFF"
        assert (await service.submit()).status_code == 202
        assert (await service.http.get("/readyz")).status_code == 200
