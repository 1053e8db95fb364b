"""``/readyz`` costs next to nothing, however often it is asked."""

from __future__ import annotations

import asyncio

import pytest
from support.serving import Serving, until
from zbv_service.api import readiness
from zbv_service.database import Database, DatabaseAway

pytestmark = pytest.mark.anyio


async def test_many_at_once_look_at_the_database_once(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = 0
    go_on = asyncio.Event()

    async def ping(_self: Database) -> None:
        nonlocal pings
        pings += 1
        await go_on.wait()

    monkeypatch.setattr(Database, "ping", ping)
    async with serving("honest") as service:
        asked = [asyncio.create_task(service.http.get("/readyz")) for _ in range(50)]
        await until(lambda: pings > 0, "the database is asked")
        asked[0].cancel()  # whoever asked first and left takes nothing from the others
        go_on.set()
        answers = await asyncio.gather(*asked[1:])
        assert {answer.status_code for answer in answers} == {200}
        assert (await service.http.get("/readyz")).status_code == 200
        assert pings == 1


async def test_what_was_found_is_looked_at_again_after_a_while(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving("honest") as service:
        assert (await service.http.get("/readyz")).status_code == 200

        async def away(_self: Database) -> None:
            raise DatabaseAway("The database does not answer.")

        monkeypatch.setattr(Database, "ping", away)
        assert (await service.http.get("/readyz")).status_code == 200
        monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
        application = service.app.state.application
        application.readiness._fresh_until = 0.0
        assert (await service.http.get("/readyz")).status_code == 503
        assert (await service.http.get("/readyz")).status_code == 503
