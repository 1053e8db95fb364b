"""Leases depend on the database's clock only, not on the clocks of services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from support.clocks import clock_off_by
from support.stored import a_plan, a_search
from zbv_service.database import Database, SearchTable
from zbv_service.database.tally import tally
from zbv_service.records.lists import SearchListQuery

MINUTE = timedelta(minutes=1)


@pytest.fixture
async def database(any_database_url: str) -> AsyncIterator[Database]:
    opened = Database(any_database_url)
    yield opened
    await opened.close()


async def test_the_database_has_the_clock(database: Database) -> None:
    for hours in (-1, 0, 1):
        with clock_off_by(hours):
            async with database.reading() as session:
                now = await database.now(session)
        assert now.tzinfo is UTC
        assert abs(now - datetime.now(UTC)) < MINUTE


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_requeues_no_search(database: Database, hours: float) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"))
    assert await table.claim("right", 60) is not None
    with clock_off_by(hours):
        assert await table.requeue_expired() == 0


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_keeps_its_searches_for_the_usual_time(
    database: Database, hours: float
) -> None:
    table = SearchTable(database)
    with clock_off_by(hours):
        await table.add(a_search("a"))
        claim = await table.claim("wrong", 60)
        assert claim is not None
    assert await table.requeue_expired() == 0
    with clock_off_by(hours):
        assert await table.renew("wrong", {"a": claim.fence}, 60) == {"a"}
    assert await table.requeue_expired() == 0
    with clock_off_by(hours):
        assert await table.renew("wrong", {"a": claim.fence}, 0.01) == {"a"}
    await asyncio.sleep(0.02)
    assert await table.requeue_expired() == 1, "its lease ends as every other one does"


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_stores_right_times(database: Database, hours: float) -> None:
    table = SearchTable(database)
    await table.add(a_search("before"))
    with clock_off_by(hours):
        await table.add(a_search("a"))
        assert (await tally(database)).queue_age < 60
        await table.request_cancel("before")
        claim = await table.claim("wrong", 60)
        assert claim is not None
        assert await table.finished("a", claim.fence, a_plan("p"))
    found, cancelled = await table.get("a"), await table.get("before")
    assert found is not None
    assert cancelled is not None
    for moment in (found.created_at, found.started_at, found.finished_at, found.updated_at):
        assert moment is not None
        assert abs(moment - datetime.now(UTC)) < MINUTE
    assert cancelled.finished_at is not None
    assert abs(cancelled.finished_at - datetime.now(UTC)) < MINUTE


async def test_searches_created_at_the_same_time_are_listed_in_order_of_submission(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's clock counts milliseconds."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)

    async def now(_database: Database, _session: object) -> datetime:
        return noon

    monkeypatch.setattr(Database, "now", now)
    table, names = SearchTable(database), list("zmaqkfyb")
    for name in names:
        await table.add(a_search(name))
    assert [record.id for record in (await table.page(SearchListQuery())).items] == names[::-1]
    # After the clock was set back, later searches sort earlier; their times are not changed.
    noon -= timedelta(hours=1)
    await table.add(a_search("back"))
    back = await table.get("back")
    assert back is not None
    assert back.created_at == noon
