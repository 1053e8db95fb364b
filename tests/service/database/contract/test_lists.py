"""Lists by pages on every kind of database: each row once, newest first, despite new rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from support.stored import a_plan, a_run, a_search, an_agent, begin, counting
from zbv_service.database import AgentTable, Database, PlanTable, RunTable, SearchTable, paging
from zbv_service.database.models import SearchRow
from zbv_service.records.lists import (
    AgentListQuery,
    Page,
    PlanListQuery,
    Position,
    RunListQuery,
    SearchListQuery,
)
from zbv_service.records.plans import PlanSummaryDocument
from zbv_service.records.searches import NewSearch, SearchRecord
from zbv_service.runs.scheduler import decide

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


async def add(database: Database, search: NewSearch, created_at: datetime) -> None:
    await SearchTable(database).add(search)
    this = update(SearchRow).where(SearchRow.id == search.id)
    async with database.writing() as session:
        await session.execute(this.values(created_at=created_at))


async def listed(table: Any, wanted: Any, after: Position | None = None) -> list[str]:
    """The searches, plans, runs or agents on a page."""
    found = (await table.page(wanted, after)).items
    return [each.plan_id if isinstance(each, PlanSummaryDocument) else each.id for each in found]


async def test_pages_hold_every_search_once_newest_first_in_both_directions(
    database: Database, table: SearchTable
) -> None:
    # Three share each time of creation, so the time alone does not order them.
    for index in range(7):
        await add(database, a_search(f"s{index}"), NOON + timedelta(microseconds=index // 3))

    def ids(page: Page[SearchRecord]) -> str:
        return "".join(record.id[1] for record in page.items)

    async def page(position: Position | None) -> Page[SearchRecord]:
        return await table.page(SearchListQuery(limit=3), position)

    first = await page(None)
    # Rows that are added meanwhile are newer, and move nothing.
    await add(database, a_search("s7"), NOON + timedelta(seconds=1))
    second = await page(first.next)
    third = await page(second.next)
    assert (ids(first), ids(second), ids(third)) == ("654", "321", "0")
    assert third.next is None
    assert ids(await page(None)) == "765"
    assert ids(await page(Position(NOON - timedelta(days=1), "x"))) == ""
    assert (await table.page(SearchListQuery(limit=8))).next is None, "a full last page"


async def test_searches_are_filtered_by_their_properties(database: Database, table: SearchTable) -> None:
    await add(database, a_search("old"), NOON)
    await add(database, a_search("wide", pp_degree=8), NOON + timedelta(seconds=1))
    await add(database, a_search("long", microbatches=64), NOON + timedelta(seconds=2))
    await add(database, a_search("loop", placement="loop"), NOON + timedelta(seconds=3))
    await add(database, a_search("fast", objective="makespan"), NOON + timedelta(seconds=4))
    await table.request_cancel("fast")
    await table.claim("me", 60)
    for wanted, expected in (
        (SearchListQuery(), ["fast", "loop", "long", "wide", "old"]),
        (SearchListQuery(pp_degree=8), ["wide"]),
        (SearchListQuery(microbatches=64), ["long"]),
        (SearchListQuery(placement="loop"), ["loop"]),
        (SearchListQuery(objective="makespan"), ["fast"]),
        (SearchListQuery(state=["running"]), ["old"]),
        (SearchListQuery(state=["running", "cancelled"]), ["fast", "old"]),
        (SearchListQuery(state=["running", "cancelled"], pp_degree=8), []),
        (SearchListQuery(created_after=NOON + timedelta(seconds=2)), ["fast", "loop"]),
        (SearchListQuery(created_before=NOON + timedelta(seconds=2)), ["wide", "old"]),
    ):
        assert await listed(table, wanted) == expected, wanted


async def test_plans_are_filtered_and_paged_like_searches(database: Database) -> None:
    table = PlanTable(database)
    for index in range(5):
        status = "optimal" if index == 3 else "feasible"
        await table.add(a_plan(f"p{index}", status=status, pp_degree=2 + index % 2, created_at=NOON))
    first = await table.page(PlanListQuery(limit=3))
    for wanted, after, expected in (
        (PlanListQuery(limit=3), None, ["p4", "p3", "p2"]),
        (PlanListQuery(limit=3), first.next, ["p1", "p0"]),
        (PlanListQuery(status="optimal"), None, ["p3"]),
        (PlanListQuery(pp_degree=3), None, ["p3", "p1"]),
    ):
        assert await listed(table, wanted, after) == expected, wanted


async def test_a_text_matches_the_beginning_of_ids(database: Database) -> None:
    searches, plans = SearchTable(database), PlanTable(database)
    for name in ("abc1", "abc2", "xabc"):
        await searches.add(a_search(name))
        await plans.add(a_plan(name))
    for text, expected in (("abc", {"abc1", "abc2"}), ("ABC1", {"abc1"}), ("bc", set()), ("%", set())):
        assert set(await listed(searches, SearchListQuery(q=text))) == expected, text
        assert set(await listed(plans, PlanListQuery(q=text))) == expected, text


async def test_runs_are_filtered_and_paged_like_searches(database: Database) -> None:
    await PlanTable(database).add(a_plan("plan"))
    table = RunTable(database)
    for index, name in enumerate(("llama", "GPT", "llama", "GPT", None)):
        model = name and {"factory": f"package.models:{name}", "arguments": {}, "seed": 0}
        script = None if name else {"path": "/shared/train.py", "arguments": []}
        what: dict[str, Any] = {"model": model, "script": script, "steps": 5 if name else None}
        created_at = NOON + timedelta(seconds=index)
        await table.add(a_run(f"r{index}", plan_id="plan", created_at=created_at, **what))
    await table.request_cancel("r1")
    first = await table.page(RunListQuery(limit=3))
    assert [run.id for run in first.items] == ["r4", "r3", "r2"]
    assert await listed(table, RunListQuery(limit=3), first.next) == ["r1", "r0"]
    for wanted, expected in (
        (RunListQuery(state=["cancelled"]), ["r1"]),
        (RunListQuery(q="r3"), ["r3"]),
        (RunListQuery(q="plan"), ["r4", "r3", "r2", "r1", "r0"]),
        (RunListQuery(q="models:gpt"), ["r3", "r1"]),
        (RunListQuery(q="SHARED/tr"), ["r4"]),
        (RunListQuery(q="gpt", state=["waiting"]), ["r3"]),
        (RunListQuery(q="m_dels"), []),
        (RunListQuery(created_after=NOON + timedelta(seconds=2)), ["r4", "r3"]),
        (RunListQuery(created_before=NOON + timedelta(seconds=2)), ["r1", "r0"]),
    ):
        assert await listed(table, wanted) == expected, wanted


async def test_ended_agents_are_listed_only_on_request(database: Database) -> None:
    table = AgentTable(database)
    for name in ("Gpu-1", "gpu-2", "cpu"):
        await table.add(*an_agent(name.lower(), name=name, address=f"{name}.cluster"))
    await table.leave("cpu")
    await table.drain("gpu-2")
    for wanted, expected in (
        (AgentListQuery(), ["gpu-2", "gpu-1"]),
        (AgentListQuery(state=["draining"]), ["gpu-2"]),
        (AgentListQuery(state=["left", "live"]), ["cpu", "gpu-1"]),
        (AgentListQuery(q="GPU"), ["gpu-2", "gpu-1"]),
        (AgentListQuery(q="-1.clu"), ["gpu-1"]),
        (AgentListQuery(q="cpu"), []),
    ):
        assert await listed(table, wanted) == expected, wanted
    one = await table.page(AgentListQuery(limit=1))
    assert await listed(table, AgentListQuery(limit=1), one.next) == ["gpu-1"]


async def test_the_best_plan_of_a_problem_is_found_by_its_key(database: Database) -> None:
    table = PlanTable(database)
    for name, value, problem in (("a", 5.0, "x"), ("b", 4.0, "x"), ("c", 4.0, "x"), ("d", 1.0, "y")):
        await table.add(a_plan(name, value, problem))
    best: Any = await table.best("x")
    assert best.plan_id == "b"
    assert await table.best("z") is None
    found = await table.best_of(["x", "y", "z"])
    assert {key: (plan.plan_id, plan.value) for key, plan in found.items()} == {
        **{"x": ("b", 4.0), "y": ("d", 1.0)}
    }
    assert await table.best_of([]) == {}


async def test_a_list_reads_only_its_page_and_the_nodes_on_it(database: Database) -> None:
    """Five runs, each started twice on four nodes: a page of three reads the last generation of these."""
    runs, agents = RunTable(database), AgentTable(database)
    for index in range(5):
        members = await begin(database, f"r{index}", 4, created_at=NOON + timedelta(seconds=index))
        for member in members:
            await runs.ended(member, f"r{index}", 0, "failed")
        assert await runs.assign(decide) == [f"r{index}"]
    with counting() as counts:
        page = await runs.page(RunListQuery(limit=3))
    assert [run.id for run in page.items] == ["r4", "r3", "r2"]
    assert {(run.generation, len(run.members)) for run in page.items} == {(1, 4)}
    assert counts.statements <= 4
    assert counts.loaded == {"RunRow": 3, "NodeRow": 3 * 4}
    with counting() as counts:
        await agents.page(AgentListQuery(limit=5))
        await SearchTable(database).page(SearchListQuery(limit=5))
        await runs.brief("r3")
    assert counts.loaded == {"AgentRow": 5, "RunRow": 1}


async def test_a_page_of_large_rows_ends_early_and_the_next_one_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "MOST_CHARACTERS", 5000)
    agents = AgentTable(database)
    for index in range(7):
        await agents.add(*an_agent(f"a{index}", devices=["x" * 1000]))
    page, pages = await agents.page(AgentListQuery()), []
    pages.append([each.id for each in page.items])
    while page.next is not None:
        page = await agents.page(AgentListQuery(), page.next)
        pages.append([each.id for each in page.items])
    assert [len(names) for names in pages] == [4, 3]
    assert [name for names in pages for name in names] == [f"a{index}" for index in reversed(range(7))]
