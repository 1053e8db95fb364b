"""What is old is forgotten in every kind of database, and only that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update
from support.stored import a_plan, a_search
from zbv_service.database import (
    Database,
    PartTable,
    PlanTable,
    Retention,
    RunPlanTable,
    RunTable,
    SearchEventTable,
    SearchTable,
)
from zbv_service.database.models import IdempotencyRow, SearchRow
from zbv_service.database.run_models import RunRow
from zbv_service.records import NamedRequest
from zbv_service.runs.records import NewPart, NewRun
from zbv_service.sweeper import Sweeper

pytestmark = pytest.mark.anyio

NOW = datetime.now(UTC)
OLD = NOW - timedelta(days=100)
LATELY = NOW - timedelta(days=1)


@pytest.fixture
async def database(any_database_url: str) -> AsyncIterator[Database]:
    opened = Database(any_database_url)
    yield opened
    await opened.close()


async def ended(database: Database, name: str, ended_at: datetime) -> None:
    """A search that was begun long ago and has found a plan."""
    table = SearchTable(database)
    await table.add(a_search(name, created_at=OLD))
    claim = await table.claim("me", 60)
    assert claim is not None
    assert await table.finished(name, claim.fence, a_plan(f"plan-{name}"))
    async with database.writing() as session:
        await session.execute(update(SearchRow).where(SearchRow.id == name).values(finished_at=ended_at))


def a_run(name: str, plan_id: str | None, search_id: str | None) -> NewRun:
    model = {"factory": "a.b:c", "arguments": {}, "seed": 0}
    return NewRun(name, plan_id, search_id, None, model, 1, 1, 5, {}, OLD)


async def with_parts(database: Database, run: NewRun) -> None:
    await RunTable(database).add(run)
    for kind in ("trace", "log"):
        await PartTable(database).put(NewPart(run.id, 0, 0, kind, b"body"))


async def kinds_of(database: Database, run_id: str) -> list[str]:
    table = PartTable(database)
    return [kind for kind in ("trace", "log") if await table.read(run_id, 0, kind)]


async def test_of_old_searches_their_plans_are_left(database: Database) -> None:
    for name, ended_at in (("old", OLD), ("lately", LATELY)):
        await ended(database, name, ended_at)
    await SearchTable(database).add(a_search("waits", created_at=OLD))
    gone = await Retention(database).forget(NOW - timedelta(days=30))
    assert (gone.searches, gone.runs) == (1, 0)
    assert {record.id for record in await SearchTable(database).newest(9)} == {"lately", "waits"}
    assert await SearchEventTable(database).after({"old": 0}) == []
    assert await PlanTable(database).document("plan-old") == b"document"
    # Asked again it is searched again, and finds that plan.
    _, is_new = await SearchTable(database).add(a_search("again", "old"))
    assert is_new


async def test_a_run_keeps_the_search_that_it_waits_for_and_does_without_any_other(
    database: Database,
) -> None:
    runs = RunTable(database)
    for name in ("waited-for", "served"):
        await ended(database, name, OLD)
    await runs.add(a_run("served", None, "served"))
    await RunPlanTable(database).settle_planned()
    await runs.add(a_run("waits", None, "waited-for"))
    await Retention(database).forget(NOW)
    assert [record.id for record in await SearchTable(database).newest(9)] == ["waited-for"]
    served, waits = await runs.get("served"), await runs.get("waits")
    assert served is not None
    assert waits is not None
    assert (served.search_id, served.plan_id) == (None, "plan-served")
    assert waits.search_id == "waited-for"


async def test_old_runs_lose_traces_and_logs_and_nothing_else(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbv_service.database.retention.PORTION", 2)
    await PlanTable(database).add(a_plan("p"))
    names = ["goes-on", "lately", *(f"old-{index}" for index in range(5))]
    for name in names:
        await with_parts(database, a_run(name, "p", None))
    async with database.writing() as session:
        for name in names[1:]:
            at = LATELY if name == "lately" else OLD
            ended = update(RunRow).where(RunRow.id == name).values(state="succeeded", finished_at=at)
            await session.execute(ended)
    gone = await Retention(database).forget(NOW - timedelta(days=30))
    assert (gone.searches, gone.runs) == (0, 5)
    assert [name for name in names if await kinds_of(database, name) == ["trace", "log"]] == names[:2]
    assert [name for name in names if await kinds_of(database, name) == []] == names[2:]
    assert len(await RunTable(database).newest(99)) == 7


async def test_without_being_told_for_how_long_all_is_kept_but_expired_names(database: Database) -> None:
    table = SearchTable(database)
    await ended(database, "old", OLD)
    for name, until in (("a", LATELY), ("b", NOW + timedelta(days=1))):
        await table.add(replace(a_search(f"of-{name}"), created_at=NOW), NamedRequest(name, "body", until))
    await Sweeper(Retention(database), None).sweep()
    assert await table.get("old") is not None
    names = await database.rows(select(IdempotencyRow.key_hash))
    assert [row.key_hash for row in names] == ["b"]
    await Sweeper(Retention(database), 30).sweep()
    assert await table.get("old") is None
    assert (await database.rows(select(func.count()).select_from(SearchRow)))[0][0] == 2
