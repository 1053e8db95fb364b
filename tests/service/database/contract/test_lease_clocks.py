"""Leases depend on the database's clock only, not on the clocks of services."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from support.clocks import clock_off_by
from support.stored import a_plan, a_search, claimed, found_in, next_of
from zbv_service.database import Database, SearchTable
from zbv_service.database.tally import tally
from zbv_service.records.lists import SearchListQuery

MINUTE = timedelta(minutes=1)


async def test_the_database_has_the_clock(database: Database) -> None:
    for hours in (-1, 0, 1):
        with clock_off_by(hours):
            async with database.reading() as session:
                now = await database.now(session)
        assert now.tzinfo is UTC
        assert abs(now - datetime.now(UTC)) < MINUTE


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_keeps_its_searches_for_the_usual_time(
    database: Database, hours: float
) -> None:
    """It requeues no search of others, and its own leases last as long as others'."""
    table = SearchTable(database)
    with clock_off_by(hours):
        claim = await claimed(table)
    assert await table.requeue_expired() == 0
    with clock_off_by(hours):
        assert await table.requeue_expired() == 0
        assert await table.renew("me", {"a": claim.fence}, 60) == {"a"}
    assert await table.requeue_expired() == 0
    with clock_off_by(hours):
        assert await table.renew("me", {"a": claim.fence}, 0.01) == {"a"}
    await asyncio.sleep(0.02)
    assert await table.requeue_expired() == 1


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_stores_right_times(database: Database, hours: float) -> None:
    table = SearchTable(database)
    await table.add(a_search("before"))
    with clock_off_by(hours):
        await table.add(a_search("a"))
        assert (await tally(database)).queue_age < 60
        await table.request_cancel("before")
        claim = await next_of(table)
        assert await table.finished("a", claim.fence, a_plan("p"))
    found, cancelled = await found_in(table), await found_in(table, "before")
    times = (found.created_at, found.started_at, found.finished_at, found.updated_at, cancelled.finished_at)
    assert all(moment and abs(moment - datetime.now(UTC)) < MINUTE for moment in times)


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
    back = await found_in(table, "back")
    assert back.created_at == noon
