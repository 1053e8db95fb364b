"""Many readers of events share one query, and do not delay each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from support.serving import DEADLINE, until
from support.stored import a_search, claimed, counting
from zbv_service.database import Database, SearchEventTable, SearchTable
from zbv_service.database import events as hub
from zbv_service.database.events import EventFeed
from zbv_service.records.searches import SearchEventDocument as Event
from zbv_service.records.searches import Update


@pytest.fixture
def table(elsewhere: Database, events: EventFeed[Event]) -> SearchTable:
    return SearchTable(elsewhere, events.changed)


@pytest.fixture
async def events(elsewhere: Database) -> AsyncIterator[EventFeed[Event]]:
    made = EventFeed(SearchEventTable(elsewhere))
    await made.start()
    yield made
    await made.stop()


def better(objective: float) -> Update:
    return Update(objective, 1.0, "m", b"ranks")


async def all_of(events: EventFeed[Event], search_id: str, after: int = 0) -> list[Event]:
    return [found async for batch in events.follow(search_id, after) for found in batch]


async def test_a_change_by_this_service_reaches_readers_immediately(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "POLL_SECONDS", 3600.0)
    claim = await claimed(table, "a")
    async with aclosing(cast("Any", events.follow("a", 2))) as batches:
        waiting = asyncio.create_task(anext(batches))
        await asyncio.sleep(0.05)
        await table.progressed("a", claim.fence, better(9))
        (found,) = cast("Sequence[Event]", await asyncio.wait_for(waiting, DEADLINE))
    assert (found.number, found.kind, found.objective) == (3, "improvement", 9)


async def test_many_idle_readers_cost_one_query_per_look(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "POLL_SECONDS", 0.05)
    for index in range(20):
        await table.add(a_search(f"s{index}"))
    readers = [asyncio.create_task(all_of(events, f"s{index % 20}", 1)) for index in range(400)]
    await until(lambda: events.readers == 400, "readers")
    await until(lambda: all(held.newest == 1 for held in events._channels.values()), "the first events")
    with counting() as counts:
        await until(lambda: counts.statements >= 6, "looks")
    assert all("last_event" in text for text in counts.texts)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert events.readers == 0


async def test_a_slow_reader_neither_delays_others_nor_costs_memory(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "HELD_EVENTS", 10)
    claim = await claimed(table, "a")
    slow = events.follow("a", 0)
    assert [found.number for found in await anext(slow)] == [1, 2]  # it stops reading here
    fast = asyncio.create_task(all_of(events, "a"))
    for step in range(60):
        await table.progressed("a", claim.fence, better(100.0 - step))
        held = events._channels["a"].events
        assert len(held) <= 20
    await table.ended("a", claim.fence, "failed", {})
    seen = await asyncio.wait_for(fast, DEADLINE)
    assert [found.number for found in seen] == list(range(1, 64))
    late = [found.number async for batch in slow for found in batch]
    assert late == list(range(3, 64))


async def test_a_reader_that_joins_while_the_last_one_leaves_misses_no_event(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = await claimed(table, "a")
    first, second = (cast("Any", events.follow("a", 0)) for _ in range(2))
    assert len(await anext(first)) == 2
    read, was_read, goes_on = SearchEventTable.after, asyncio.Event(), asyncio.Event()

    async def slowly(self: SearchEventTable, positions: Any) -> list[Event]:
        found = await read(self, positions)
        was_read.set()
        await goes_on.wait()
        return found

    monkeypatch.setattr(SearchEventTable, "after", slowly)
    await table.progressed("a", claim.fence, better(9))
    await was_read.wait()
    await first.aclose()
    seen = asyncio.create_task(anext(second))
    await asyncio.sleep(0.01)
    goes_on.set()
    assert [found.number for found in await asyncio.wait_for(seen, DEADLINE)] == [1, 2, 3]
    await second.aclose()


async def test_a_silent_stream_sends_signs_of_life(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "KEEP_ALIVE_SECONDS", 0.05)
    await table.add(a_search("a"))
    async with aclosing(cast("Any", events.follow("a", 1))) as batches:
        assert [len(await anext(batches)) for _ in range(3)] == [0, 0, 0]


async def test_readers_end_with_their_service(events: EventFeed[Event], table: SearchTable) -> None:
    await table.add(a_search("a"))
    reader = asyncio.create_task(all_of(events, "a"))
    await until(lambda: events.readers > 0, "a reader")
    events.hang_up()
    assert [found.kind for found in await asyncio.wait_for(reader, DEADLINE)] in ([], ["state"])


async def test_a_short_database_failure_ends_no_stream(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, found = await claimed(table, "a"), list[Event]()

    async def follow() -> None:
        async for batch in events.follow("a", 0):
            found.extend(batch)

    reader = asyncio.create_task(follow())
    await until(lambda: len(found) == 2, "a reader that has the events so far")
    read = SearchEventTable.after
    failures: list[datetime] = []

    async def fail_once(self: SearchEventTable, positions: Any) -> list[Event]:
        if not failures:
            failures.append(datetime.now(UTC))
            raise OSError("the disk is gone")
        return await read(self, positions)

    monkeypatch.setattr(SearchEventTable, "after", fail_once)
    await table.ended("a", claim.fence, "failed", {})
    await asyncio.wait_for(reader, DEADLINE)
    assert found[-1].kind == "end"
    assert failures


async def test_readers_of_old_events_take_turns(
    events: EventFeed[Event], table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = await claimed(table, "a")
    for step in range(6):
        await table.progressed("a", claim.fence, better(100.0 - step))
    read, reading, most = SearchEventTable.after, 0, 0

    async def counted(self: SearchEventTable, positions: Any) -> list[Event]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.001)
        found = await read(self, positions)
        reading -= 1
        return found

    readers = [cast("Any", events.follow("a", 0)) for _ in range(16)]
    monkeypatch.setattr(SearchEventTable, "after", counted)
    await asyncio.wait_for(asyncio.gather(*map(anext, readers)), DEADLINE)
    assert most <= 2, "one reader of old events at a time, next to the loop that reads new ones"
    for reader in readers:
        await reader.aclose()
