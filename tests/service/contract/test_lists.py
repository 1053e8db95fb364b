"""Lists by pages in every kind of database: each row once, the newest first, whatever comes in meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from support.stored import a_plan, a_search
from zbv_service.database import Database, PlanTable, SearchTable
from zbv_service.records import PlanFilter, Position, SearchFilter

pytestmark = pytest.mark.anyio

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
async def database(any_database_url: str) -> AsyncIterator[Database]:
    opened = Database(any_database_url)
    yield opened
    await opened.close()


async def listed(table: SearchTable, wanted: SearchFilter, limit: int = 1000) -> list[str]:
    return [record.id for record in (await table.page(wanted, limit)).items]


async def test_pages_hold_every_search_once_the_newest_first(database: Database) -> None:
    table = SearchTable(database)
    # Three share each moment, so that the moment alone cannot tell them apart.
    for index in range(11):
        await table.add(a_search(f"s{index:02}", created_at=NOON + timedelta(microseconds=index // 3)))
    found: list[str] = []
    position: Position | None = None
    pages = 0
    while pages == 0 or position is not None:
        page = await table.page(SearchFilter(), 2, position)
        found.extend(record.id for record in page.items)
        position, pages = page.next, pages + 1
        # What comes in meanwhile is newer, and moves nothing.
        await table.add(a_search(f"t{pages}", created_at=NOON + timedelta(seconds=1)))
    assert found == [f"s{index:02}" for index in range(10, -1, -1)]
    assert pages == 6


async def test_a_full_last_page_has_no_next(database: Database) -> None:
    table = SearchTable(database)
    for name in "ab":
        await table.add(a_search(name))
    assert (await table.page(SearchFilter(), 2)).next is None
    assert (await table.page(SearchFilter(), 1)).next is not None


async def test_searches_are_filtered_by_what_they_are(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("old", created_at=NOON))
    await table.add(a_search("wide", pp_degree=8, created_at=NOON + timedelta(seconds=1)))
    await table.add(a_search("long", microbatches=64, created_at=NOON + timedelta(seconds=2)))
    await table.add(a_search("loop", placement="loop", created_at=NOON + timedelta(seconds=3)))
    await table.add(a_search("fast", objective="makespan", created_at=NOON + timedelta(seconds=4)))
    await table.request_cancel("fast")
    await table.claim("me", 60)
    for wanted, expected in (
        (SearchFilter(), ["fast", "loop", "long", "wide", "old"]),
        (SearchFilter(pp_degree=8), ["wide"]),
        (SearchFilter(microbatches=64), ["long"]),
        (SearchFilter(placement="loop"), ["loop"]),
        (SearchFilter(objective="makespan"), ["fast"]),
        (SearchFilter(states=frozenset({"running"})), ["old"]),
        (SearchFilter(states=frozenset({"running", "cancelled"})), ["fast", "old"]),
        (SearchFilter(states=frozenset({"running", "cancelled"}), pp_degree=8), []),
        (SearchFilter(created_after=NOON + timedelta(seconds=2)), ["fast", "loop"]),
        (SearchFilter(created_before=NOON + timedelta(seconds=2)), ["wide", "old"]),
    ):
        assert await listed(table, wanted) == expected, wanted


async def test_plans_are_filtered_and_paged_alike(database: Database) -> None:
    table = PlanTable(database)
    for index in range(5):
        status = "optimal" if index == 3 else "feasible"
        await table.add(a_plan(f"p{index}", status=status, pp_degree=2 + index % 2, created_at=NOON))
    first = await table.page(PlanFilter(), 3)
    rest = await table.page(PlanFilter(), 3, first.next)
    assert [plan.plan_id for plan in (*first.items, *rest.items)] == ["p4", "p3", "p2", "p1", "p0"]
    assert rest.next is None
    assert [plan.plan_id for plan in (await table.page(PlanFilter(status="optimal"), 9)).items] == ["p3"]
    assert [plan.plan_id for plan in (await table.page(PlanFilter(pp_degree=3), 9)).items] == ["p3", "p1"]


async def test_the_best_plan_of_a_problem_is_found_by_its_key(database: Database) -> None:
    table = PlanTable(database)
    for name, value, problem in (("a", 5.0, "x"), ("b", 4.0, "x"), ("c", 4.0, "x"), ("d", 1.0, "y")):
        await table.add(a_plan(name, value, problem))
    best = await table.best("x")
    assert best is not None
    assert best.plan_id == "b"
    assert await table.best("z") is None
