"""Old rows are removed on every kind of database; recent, unfinished and referenced rows stay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from support.clocks import days_later
from support.stored import a_layout_search, a_plan, a_search, claimed, found_in, next_of
from support.stored import a_run as new_run
from zbv_service.database import Database, Keep, PlanTable, Retention, RunTable, SearchTable
from zbv_service.database.models import (
    AgentRow,
    EventRow,
    NodeRow,
    PartRow,
    PlanRow,
    RunRow,
    SearchEventRow,
    SearchRow,
    TokenRow,
)
from zbv_service.database.retention import Sweeper
from zbv_service.records.lists import SearchListQuery
from zbv_service.records.searches import LayoutCounts, Outcome, SearchState

KEEP = Keep(others=10, plans=20)
FOREVER = Keep(others=36_500, plans=36_500)
NAMES = {
    "searches": SearchRow.id,
    "events": SearchEventRow.search_id,
    "plans": PlanRow.plan_id,
    "runs": RunRow.id,
    "run events": EventRow.run_id,
    "nodes": NodeRow.run_id,
    "parts": PartRow.run_id,
    "agents": AgentRow.id,
    "tokens": TokenRow.id,
}
Stored = dict[str, set[str]]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH", "LARGE_BATCH"):
        monkeypatch.setattr(f"zbv_service.database.retention.{name}", 2)


async def stored(database: Database) -> Stored:
    return {name: {row[0] for row in await database.rows(select(column))} for name, column in NAMES.items()}


def without(before: Stored, names: Mapping[str, str]) -> Stored:
    gone = {table: {f"old-{name}" for name in text.split()} for table, text in names.items()}
    assert all(rows <= before[table] for table, rows in gone.items()), "they were there"
    return {table: rows - gone.get(table, set()) for table, rows in before.items()}


async def ended(database: Database, name: str, state: SearchState, plan_id: str | None = None) -> None:
    """A search that was started and ends now."""
    table = SearchTable(database)
    await table.add(a_search(name))
    claim = await next_of(table)
    if state == "cancelled":
        await table.request_cancel(name)
    if plan_id is None:
        assert await table.ended(name, claim.fence, state, {"detail": "why"})
    else:
        assert await table.finished(name, claim.fence, Outcome.of(a_plan(plan_id)))


def a_run(now: datetime, name: str, state: str, plan_id: str | None, **more: Any) -> RunRow:
    values: dict[str, Any] = {
        **{"model": {"factory": "a.b:c"}, "nodes": 1, "ranks_per_node": 1, "steps": 5, "options": {}},
        **{"generation": 0, "stop_requested": False, "cancel_requested": False},
        **{"failures": [], "refusals": [], "created_at": now, "updated_at": now},
        "finished_at": now if state in ("succeeded", "failed", "cancelled") else None,
    }
    return RunRow(id=name, state=state, plan_id=plan_id, **{**values, **more})


def an_agent(now: datetime, name: str, state: str, run_id: str | None = None) -> AgentRow:
    place: dict[str, Any] = {"name": name, "address": "h", "port": 1, "slots": 1, "devices": [], "owner": "t"}
    allowed: dict[str, Any] = {"versions": {}, "allowed_models": [], "allowed_scripts": []}
    times = {"created_at": now, "seen_at": now}
    return AgentRow(id=name, state=state, run_id=run_id, **place, **allowed, **times)


def parts_of(now: datetime, name: str, agent: str, plan_id: str) -> list[Any]:
    """An event, a node with its agent, a trace of a plan, and a log."""
    place = {"run_id": name, "generation": 0}
    node = {"node_rank": 0, "agent_name": agent, "rendezvous": "h:1", "state": "ended"}
    return [
        EventRow(run_id=name, at=now, kind="waiting", detail=""),
        NodeRow(**place, **node, agent_id=agent, ranks=[], failures=[]),
        *(
            PartRow(**place, rank=0, kind=kind, plan_id=plan, body=b"body", updated_at=now)
            for kind, plan in (("trace", plan_id), ("log", None))
        ),
    ]


def a_token(now: datetime, name: str, kind: str = "token", **more: Any) -> TokenRow:
    return TokenRow(id=name, kind=kind, name=name, secret_hash="", scopes=[], created_at=now, **more)


async def fill(database: Database, of: str) -> None:
    """One row of every kind; names begin with ``of``."""
    async with database.writing() as session:
        now = await database.now(session)
    table, plans = SearchTable(database), PlanTable(database)
    for name in ("done", "waited", "measured"):
        await ended(database, f"{of}-{name}", "done", f"{of}-found")
    for state in ("failed", "infeasible", "cancelled"):
        await ended(database, f"{of}-{state}", state)
    await claimed(table, f"{of}-running")
    await table.add(a_search(f"{of}-queued"))
    for name in ("alone", "fetched", "ran", "traced", "earlier", "live", "target", "offered", "replanned"):
        await plans.add(a_plan(f"{of}-{name}", created_at=now))

    measured = {"plan_id": f"{of}-replanned", "search_id": f"{of}-measured", "generation": 0, "step": 1}
    offer = {"target_plan_id": f"{of}-target", "offer": {"plan_id": f"{of}-offered"}}
    replanning: dict[str, Any] = {"replanning": measured, **offer}
    soon, later = now + timedelta(minutes=1), now + timedelta(days=10_000)
    agents = {"left": "left", "lost": "lost", "live": "live", "of-run": "left", "of-open": "lost"}
    for rows in (
        [
            *(an_agent(now, f"{of}-{name}", state) for name, state in agents.items()),
            a_run(now, f"{of}-ended", "succeeded", f"{of}-ran"),
            a_run(now, f"{of}-held", "failed", None),
            a_run(now, f"{of}-planning", "planning", None, search_id=f"{of}-waited"),
            # A run with a plan does not need its search any more.
            a_run(now, f"{of}-open", "running", f"{of}-live", search_id=f"{of}-done", **replanning),
            a_token(now, f"{of}-ever"),
            a_token(now, f"{of}-later", expires_at=later),
            a_token(now, f"{of}-expired", expires_at=soon),
            a_token(now, f"{of}-revoked", revoked_at=now),
        ],
        [
            *parts_of(now, f"{of}-ended", f"{of}-of-run", f"{of}-traced"),
            *parts_of(now, f"{of}-open", f"{of}-of-open", f"{of}-earlier"),
            an_agent(now, f"{of}-had", "left", run_id=f"{of}-open"),
            an_agent(now, f"{of}-clings", "left", run_id=f"{of}-held"),
            a_token(now, f"{of}-s1", "session", parent_id=f"{of}-ever", expires_at=soon),
            a_token(now, f"{of}-s2", "session", parent_id=f"{of}-ever", expires_at=later),
            a_token(now, f"{of}-s3", "session", parent_id=f"{of}-revoked", expires_at=later),
            a_token(now, f"{of}-l1", "link", parent_id=f"{of}-expired", expires_at=later),
        ],
    ):
        async with database.writing() as session:
            session.add_all(rows)


AFTER: list[tuple[float, dict[str, str]]] = [
    # Days since the old rows were stored, and the rows that the sweep of this day removes.
    (
        10.1,
        {
            **{"searches": "done infeasible cancelled", "events": "done infeasible cancelled"},
            **{"parts": "ended", "agents": "left lost", "tokens": "expired revoked s1 s3 l1"},
        },
    ),
    (
        20.1,
        {
            **{"runs": "ended", "run events": "ended", "nodes": "ended", "agents": "of-run"},
            **{"searches": "failed", "events": "failed", "plans": "alone traced ran"},
        },
    ),
    (32.1, {"plans": "fetched"}),
]


async def test_a_sweep_removes_old_rows_of_every_kind_and_no_others(database: Database) -> None:
    retention = Retention(database)
    await fill(database, "old")
    expected = await stored(database)
    assert await retention.sweep(KEEP) == {}
    with days_later(12):
        await retention.note_uses(["old-fetched", "unknown"])
    for days, gone in AFTER:
        expected = without(expected, gone)
        with days_later(days):
            await retention.sweep(KEEP)
            assert await stored(database) == expected, f"after {days} days"
            assert await retention.sweep(KEEP) == {}, "all of it goes at once, in batches"

    with days_later(1000):
        assert await SearchTable(database).claim("me", 60) is not None, "old-queued"
        await fill(database, "new")
        before = await stored(database)
        await retention.sweep(KEEP)
        # Of the old rows only the unfinished ones and those that they refer to are left.
        assert await stored(database) == before
        left = {name for names in before.values() for name in names if name.startswith("old")}
        assert {name.removeprefix("old-") for name in left} == {
            *("queued", "running", "waited", "measured", "planning", "open"),
            *("found", "earlier", "live", "target", "offered", "replanned"),
            *("held", "clings", "live", "had", "of-open", "ever", "later", "s2"),
        }


async def test_the_plans_of_a_ranking_stay_with_its_search(database: Database, table: SearchTable) -> None:
    await table.add(a_layout_search("s"))
    claim = await next_of(table)
    plans = (a_plan("best"), a_plan("second"), a_plan("best"))  # two layouts may share a plan
    counts = {"considered": 3, "ruled_out": 0, "planned": 3}
    ranking = Outcome(plans, 2.5, 2.0, b"answer", counts)
    assert not await table.finished("s", claim.fence + 1, ranking), "another service holds it"
    assert await table.finished("s", claim.fence, ranking)
    assert await table.answer("s") == b"answer"
    record = await found_in(table, "s")
    assert (record.state, record.plan_id, record.gap) == ("done", "best", 0.25)
    assert record.progress == LayoutCounts(**counts)
    with days_later(30):
        await Retention(database).sweep(replace(KEEP, others=40))
        assert (await stored(database))["plans"] == {"best", "second"}
        gone = await Retention(database).sweep(KEEP)
    assert gone == {"searches": 1, "plans": 2}


async def test_with_infinite_retention_nothing_is_removed(database: Database) -> None:
    await fill(database, "old")
    before = await stored(database)
    with days_later(30_000):
        assert await Retention(database).sweep(FOREVER) == {}
        assert await stored(database) == before


async def test_a_sweep_stops_after_the_current_batch(database: Database) -> None:
    for index in range(6):
        await ended(database, f"s{index}", "infeasible")
    asked = 0

    def is_enough() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4  # once for each of the two earlier kinds; searches take two batches

    with days_later(100):
        assert await Retention(database).sweep(KEEP, is_enough) == {"searches": 4}
        assert len((await stored(database))["searches"]) == 2


async def test_a_plan_that_is_found_again_or_fetched_counts_as_used(database: Database) -> None:
    plans, used = PlanTable(database), {"fetched"}
    for name in ("again", "fetched", "not"):
        await plans.add(a_plan(name))
    sweeper = Sweeper(Retention(database), KEEP, used)
    with days_later(15):
        assert not await plans.add(a_plan("again"))
    with days_later(21):
        await sweeper.sweep()
        assert used == set()
        assert (await stored(database))["plans"] == {"again", "fetched"}
    with days_later(36):
        await sweeper.sweep()
        assert (await stored(database))["plans"] == {"fetched"}
    with days_later(42):
        await sweeper.start()  # it sweeps at once
        while (await stored(database))["plans"]:
            pass
        await sweeper.stop()
        assert "zbv-sweeper" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_concurrent_sweeps_remove_everything_once(database: Database, second: Database) -> None:
    for index in range(9):
        await PlanTable(database).add(a_plan(f"p{index}"))
        await ended(database, f"s{index}", "infeasible")
    with days_later(25):
        gone = await asyncio.gather(*(Retention(each).sweep(KEEP) for each in (database, second)))
        assert [sum(each.get(kind, 0) for each in gone) for kind in ("plans", "searches")] == [9, 9]
    assert (await SearchTable(database).page(SearchListQuery())).items == ()


async def test_a_run_that_is_submitted_while_its_plan_is_removed_keeps_it_or_is_refused(
    database: Database, second: Database
) -> None:
    """A run is never stored without its plan."""
    names = [f"p{index}" for index in range(8)]
    for name in names:
        await PlanTable(database).add(a_plan(name))
    runs = RunTable(second)
    with days_later(25):
        adding = [runs.add(new_run(f"r-{name}", plan_id=name)) for name in names]
        sweep = Retention(database).sweep(KEEP)
        swept, *outcomes = await asyncio.gather(sweep, *adding, return_exceptions=True)
    left = (await stored(database))["plans"]
    assert isinstance(swept, dict)
    for name, outcome in zip(names, outcomes, strict=True):
        run = await runs.get(f"r-{name}")
        assert (name in left) == (run is not None) == (not isinstance(outcome, Exception))
        assert isinstance(outcome, IntegrityError) or run is not None
