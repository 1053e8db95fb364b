"""The events of searches on every kind of database: numbered in order, in the change's transaction."""

from __future__ import annotations

import asyncio

import pytest
from support.stored import a_layout_search, a_plan, a_search, claimed, found_in, next_of
from zbv_service.database import Database, SearchEventTable, SearchTable
from zbv_service.database import events as stored
from zbv_service.records.searches import Outcome, Update
from zbv_service.records.searches import SearchEventDocument as Event


def found(objective: float, lower_bound: float, ranks: bytes = b"ranks") -> Update:
    return Update(objective, lower_bound, "m", ranks)


async def stored_events(database: Database, search_id: str = "a", after: int = 0) -> list[Event]:
    return await SearchEventTable(database).after({search_id: after})


async def test_stored_results_never_get_worse(database: Database, table: SearchTable) -> None:
    """Reports that are worse than the results of an earlier attempt are not visible."""
    first = await claimed(table)
    assert await table.progressed("a", first.fence, found(10, 5, b"ten"))
    assert await table.progressed("a", first.fence, found(8, 6, b"eight"))
    assert await table.requeue("a", first.fence, None)
    second = await next_of(table)
    assert second.incumbent == b"eight"
    assert await table.progressed("a", second.fence, found(12, 4, b"twelve"))
    assert await table.progressed("a", second.fence, found(9, 7, b"nine"))  # its bound still counts
    record = await found_in(table)
    assert (record.objective, record.lower_bound, record.gap) == (8, 7, 8 / 7 - 1)
    assert await table.finished("a", second.fence, Outcome.of(a_plan("p", 7.5)))  # its bound is 2
    record = await found_in(table)
    assert (record.objective, record.lower_bound, record.plan_id) == (7.5, 7, "p")
    seen = [(e.kind, e.objective, e.lower_bound) for e in await stored_events(database) if e.kind != "state"]
    assert seen == [
        ("improvement", 10, 5),
        ("improvement", 8, 6),
        ("bound", 8, 7),
        ("improvement", 7.5, 7),
        ("end", 7.5, 7),
    ]


async def test_a_report_without_progress_and_a_rejected_change_add_no_event(database: Database) -> None:
    heard: list[str] = []
    table = SearchTable(database, heard.append)
    claim = await claimed(table)
    for _ in range(3):
        assert await table.progressed("a", claim.fence, found(10, 5))
    assert [event.kind for event in await stored_events(database)] == ["state", "state", "improvement"]
    heard.clear()
    assert not await table.progressed("a", claim.fence - 1, found(9, 5))
    assert not await table.finished("a", claim.fence - 1, Outcome.of(a_plan("p")))
    assert (len(await stored_events(database)), heard) == (3, [])
    assert await table.finished("a", claim.fence, Outcome.of(a_plan("p", 6.0)))
    assert (len(await stored_events(database)), heard) == (5, ["a"])


async def test_numbers_count_every_change_of_a_search(database: Database, second: Database) -> None:
    """Also with simultaneous changes by several services."""
    tables = [SearchTable(database), SearchTable(second)]
    claims = [await claimed(tables[0], name) for name in "ab"]
    changes = [
        tables[step % 2].progressed(claim.id, claim.fence, found(100.0 - step, 1))
        for step in range(10)
        for claim in claims
    ]
    assert all(await asyncio.gather(*changes))
    for name in "ab":
        events = await stored_events(second, name)
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        values = [event.objective or 0.0 for event in events if event.kind == "improvement"]
        assert values == sorted(values, reverse=True)
        assert (await SearchEventTable(database).last_numbers([name])) == {name: len(events)}
        assert await stored_events(database, name, after=3) == events[3:]


async def test_only_the_newest_improvements_are_kept(
    database: Database, table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "KEPT_EVENTS", 10)
    monkeypatch.setattr(stored, "PRUNED_EVERY", 5)
    claim = await claimed(table)
    for step in range(40):
        await table.progressed("a", claim.fence, found(100.0 - step, 1))
    numbers = [event.number for event in await stored_events(database)]
    assert numbers[:2] == [1, 2]  # the first events stay
    assert numbers[2:] == list(range(numbers[2], 43))
    assert 10 <= len(numbers) - 2 <= 15


async def test_many_searches_are_read_at_once(database: Database, table: SearchTable) -> None:
    events = SearchEventTable(database)
    names = [f"s{index}" for index in range(30)]
    for name in names:
        await table.add(a_search(name))
    everything = dict.fromkeys([*names, *(f"gone{index}" for index in range(1000))], 0)
    assert await events.last_numbers(everything) == dict.fromkeys(names, 1)
    assert sorted(event.search_id for event in await events.after(everything)) == sorted(names)


async def test_cancelled_discarded_and_requeued_searches_are_unwanted(table: SearchTable) -> None:
    fences = {name: (await claimed(table, name)).fence for name in "abcd"}
    await table.request_cancel("b")
    await table.discard("c")
    await table.requeue("d", fences["d"], None)
    assert await table.unwanted(fences) == {"b", "c", "d"}
    assert await table.unwanted({}) == set()


async def test_what_a_search_of_layouts_planned_is_an_event(database: Database, table: SearchTable) -> None:
    await table.add(a_layout_search("a"))
    claim = await next_of(table)
    for planned, step in enumerate((None, 9.0, 9.0, 8.0)):
        counts = {"considered": 3, "ruled_out": 0, "planned": planned}
        assert await table.progressed("a", claim.fence, Update(step, 1.0, None, None, progress=counts))
    events = [event for event in await stored_events(database) if event.kind != "state"]
    kinds = ["progress", "improvement", "progress", "improvement"]
    expected = list(zip(kinds, (None, 9, 9, 8), strict=True))
    assert [(event.kind, event.objective) for event in events] == expected
    assert [event.progress and event.progress.planned for event in events] == [0, 1, 2, 3]
