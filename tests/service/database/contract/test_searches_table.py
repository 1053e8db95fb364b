"""Searches and plans on every kind of database: transactions, leases, fences and submitters."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from support.serving import DEADLINE
from support.stored import a_layout_search, a_plan, a_run, a_search, claimed, found_in, next_of
from zbv_service.database import (
    Database,
    PlanTable,
    RunTable,
    SearchEventTable,
    SearchGone,
    SearchTable,
    TooManySearches,
)
from zbv_service.database.models import SearchRow
from zbv_service.documents.problems import pack
from zbv_service.records.plans import Refusal
from zbv_service.records.searches import Outcome, Update
from zbv_solver.errors import ContradictedBound

BETTER = Update(5.0, 2.0, "m", b"ranks")
REASONS = ("service-stopped", "process-died", "worker-ended")


async def test_a_request_is_stored_once_until_it_is_given_up(table: SearchTable) -> None:
    assert (await table.add(a_search("a", "key")))[1]
    again, is_new = await table.add(a_search("b", "key"))
    assert (again.id, is_new) == ("a", False)
    await table.request_cancel("a")
    assert (await table.add(a_search("c", "key")))[1]
    await table.add(a_search("d", "other"))
    found = await table.of_requests(["key", "other", "none"])
    assert {key: record.id for key, record in found.items()} == {"key": "c", "other": "d"}


async def test_discarding_removes_everything_except_the_plan(database: Database, table: SearchTable) -> None:
    claim = await claimed(table, "a", "key")
    assert await table.finished("a", claim.fence, Outcome.of(a_plan("p")))
    assert await table.discard("a")
    assert not await table.discard("a")
    assert await table.get("a") is None
    assert await SearchEventTable(database).after({"a": 0}) == []
    assert await PlanTable(database).document("p") == b"document"
    assert (await table.add(a_search("b", "key")))[1]


async def test_writes_to_a_discarded_search_are_ignored(database: Database, table: SearchTable) -> None:
    claim = await claimed(table)
    assert await table.discard("a")
    assert await table.renew("me", {"a": claim.fence}, 60) == set()
    assert not await table.finished("a", claim.fence, Outcome.of(a_plan("p")))
    assert await PlanTable(database).document("p") is None
    assert not any([await table.requeue("a", claim.fence, None, reason, 1, {}) for reason in REASONS])


async def test_the_bound_over_all_cuts_belongs_to_the_search_and_not_to_the_plan(
    database: Database, table: SearchTable
) -> None:
    await table.add(a_search("a", placement="auto", layers=8))
    claim = await next_of(table)
    found = replace(a_plan("p", 5.0, placement="loop", lower_bound=4.5), search_bound=4.0)
    assert await table.finished("a", claim.fence, Outcome.of(found))
    record = await found_in(table)
    assert (record.objective, record.lower_bound, record.gap) == (5.0, 4.0, 0.25)
    assert record.summary.layers == 8
    (stored,) = await PlanTable(database).newest(1)
    assert (stored.placement, stored.lower_bound) == ("loop", 4.5)


async def test_only_the_current_owner_writes(table: SearchTable) -> None:
    await table.add(a_search("a"))
    old = await next_of(table, "old")
    assert await table.progressed("a", old.fence, BETTER)
    assert await table.requeue_lost({"old"}) == 1
    new = await next_of(table, "new")
    assert (new.fence, new.attempts, new.incumbent) == (old.fence + 1, 2, b"ranks")

    assert await table.renew("old", {"a": old.fence}, 60) == set()
    assert await table.renew("old", {"a": new.fence}, 60) == set(), "another one holds it"
    for late in (
        table.progressed("a", old.fence, BETTER),
        *(table.requeue("a", old.fence, None, reason, 1, {}) for reason in REASONS),
        table.ended("a", old.fence, "failed", {}),
        table.finished("a", old.fence, Outcome.of(a_plan("p"))),
    ):
        assert not await late
    record = await found_in(table)
    assert (record.state, record.crashes, record.plan_id) == ("running", 0, None)

    assert await table.renew("new", {"a": new.fence}, 60) == {"a"}
    assert await table.renew("new", {"a": old.fence}, 60) == set(), "the fence of its earlier attempt"
    assert await table.finished("a", new.fence, Outcome.of(a_plan("p")))
    assert not await table.finished("a", new.fence, Outcome.of(a_plan("p")))


async def test_a_search_fails_after_too_many_crashes(table: SearchTable) -> None:
    await table.add(a_search("a", "key"))
    for death in range(3):
        claim = await next_of(table)
        assert claim.incumbent == (None if death == 0 else b"ranks")
        assert await table.requeue("a", claim.fence, BETTER, "process-died", 3, {"detail": "why"})
    record = await found_in(table)
    assert (record.state, record.crashes, record.objective) == ("failed", 3, 5)
    assert record.error == {"detail": "why"}
    assert (await table.add(a_search("b", "key")))[1], "it can be asked for again"


@pytest.mark.parametrize(("is_cancelled", "state"), [(True, "cancelled"), (False, "failed")])
async def test_a_killed_search_is_cancelled_only_if_somebody_cancelled_it(
    table: SearchTable, is_cancelled: bool, state: str
) -> None:
    for name in ("killed", "unplanned"):
        await table.add(a_layout_search(name))
        claim = await next_of(table)
        if is_cancelled:
            await table.request_cancel(name)
        if name == "killed":
            assert await table.killed(name, claim.fence, {"detail": "why"})
        else:
            found = Outcome((), None, 0.0, b"answer", {"considered": 5, "ruled_out": 0, "planned": 0})
            assert await table.finished(name, claim.fence, found, {"detail": "why"})
        record = await found_in(table, name)
        assert (record.state, record.error) == (state, None if is_cancelled else {"detail": "why"})


async def test_a_search_fails_after_too_many_evictions_without_progress(table: SearchTable) -> None:
    """Progress restarts the count."""
    states = []
    await table.add(a_search("a"))
    for value in (None, None, 9.0, None, None, None):
        claim = await next_of(table)
        found = None if value is None else Update(value, 4.0, "m", b"ranks")
        assert await table.requeue("a", claim.fence, found, "worker-ended", 4, {"detail": "why"})
        states.append((await found_in(table)).state)
    assert states == ["queued"] * 5 + ["failed"]
    ended = await found_in(table)
    assert (ended.crashes, ended.error) == (0, {"detail": "why"})


async def test_a_reading_session_sees_one_consistent_state(database: Database, second: Database) -> None:
    count = select(func.count()).select_from(SearchRow)
    loop = asyncio.get_running_loop()

    def find(session: Session) -> list[int | None]:
        before = session.scalar(count)
        added = asyncio.run_coroutine_threadsafe(SearchTable(second).add(a_search("a")), loop)
        added.result(DEADLINE)
        return [before, session.scalar(count)]

    async with database.writing():
        pass  # switches SQLite to write-ahead logging, as the migration of a service does
    assert await database.read(find) == [0, 0]
    assert (await database.rows(count))[0][0] == 1


async def test_a_plan_is_stored_once_with_its_time_in_utc(database: Database) -> None:
    table, plan = PlanTable(database), a_plan("p")
    assert await table.add(plan)
    assert not await table.add(replace(a_plan("p"), document=b"another document"))
    assert await table.document("p") == b"document"
    assert await table.document("q") is None
    (stored,) = await table.newest(1)
    assert (stored.created_at, stored.created_at.tzinfo) == (plan.summary.created_at, UTC)


async def test_a_plan_below_a_stored_bound_is_rejected(database: Database, table: SearchTable) -> None:
    asked = pack({"pp_degree": 2})
    await table.add(replace(a_search("a", "key"), problem=asked))
    claim = await next_of(table)
    assert await table.progressed("a", claim.fence, Update(9.0, 8.5, "m", b"ranks"))
    better, plan = Update(8.0, 8.0, "n", b"others"), a_plan("p")  # of value 3 and bound 2
    for store in (
        table.progressed("a", claim.fence, better),
        *(table.requeue("a", claim.fence, better, reason, 1, {}) for reason in REASONS),
        table.finished("a", claim.fence, Outcome.of(plan)),
    ):
        with pytest.raises(ContradictedBound) as raised:
            await store
        assert raised.value.problem == {"pp_degree": 2}
        assert raised.value.bound == 8.5
    before = await found_in(table)
    assert (before.state, before.objective, before.lower_bound, before.crashes) == ("running", 9, 8.5, 0)
    assert await PlanTable(database).document("p") is None

    assert await table.contradicted("a", claim.fence, {"detail": "why"})
    failed = await found_in(table)
    assert (failed.state, failed.error, failed.crashes) == ("failed", {"detail": "why"}, 0)
    assert (failed.objective, failed.lower_bound, failed.gap, failed.method) == (None, None, None, None)
    assert await table.problem("a") == asked
    assert (await table.add(a_search("b", "key")))[1], "it can be asked for again"


async def test_a_bound_above_the_objective_by_rounding_is_lowered(table: SearchTable) -> None:
    claim = await claimed(table)
    assert await table.progressed("a", claim.fence, Update(9.0, 3 * (1 + 1e-13), "m", b"ranks"))
    assert await table.finished("a", claim.fence, Outcome.of(a_plan("p")))
    done = await found_in(table)
    assert (done.state, done.lower_bound, done.gap) == ("done", 3.0, 0.0)


async def test_an_incumbent_that_does_not_fit_goes_with_its_objective_and_bound(table: SearchTable) -> None:
    for name in "abc":
        await table.add(a_search(name))
    for first in [await next_of(table) for _ in range(3)]:
        assert await table.requeue(first.id, first.fence, Update(1.0, 1.0, "foreign", b"foreign"))
    refusal = Refusal(hashlib.sha256(b"foreign").hexdigest(), "why")
    a, b, c = [await next_of(table) for _ in range(3)]

    own = replace(BETTER, refusal=refusal)
    assert await table.progressed(a.id, a.fence, own)
    # Every report of the attempt carries the refusal; results of the attempt itself stay.
    assert await table.progressed(a.id, a.fence, replace(own, objective=7.0, incumbent=b"worse"))
    assert await table.finished(b.id, b.fence, Outcome.of(a_plan("p"), refusal))
    unrelated = replace(own, lower_bound=0.5, refusal=Refusal("of another", "why"))
    assert await table.progressed(c.id, c.fence, unrelated)
    records = [await found_in(table, name) for name in "abc"]
    assert [(record.objective, record.lower_bound) for record in records] == [(5, 2), (3, 2), (1, 1)]


async def test_callers_that_submit_at_once_keep_their_limits(database: Database, second: Database) -> None:
    tables = [SearchTable(database), SearchTable(second)]

    async def add(number: int, caller: str) -> bool:
        try:
            await tables[number % 2].add(a_search(f"{caller}{number}", created_by=caller), most=5)
        except TooManySearches:
            return False
        return True

    found = {caller: await asyncio.gather(*(add(number, caller) for number in range(20))) for caller in "ab"}
    assert {caller: sum(accepted) for caller, accepted in found.items()} == {"a": 5, "b": 5}


KEY = "key"


async def client_asks(database: Database, name: str) -> str:
    record, _ = await SearchTable(database).add(a_search(name, KEY))
    return record.id


async def run_asks(database: Database, run_id: str) -> str:
    while True:
        record, _ = await SearchTable(database).add(a_search(f"of-{run_id}", KEY), for_run=True)
        try:
            await RunTable(database).add(a_run(run_id, 1, plan_id=None, search_id=record.id))
        except SearchGone:
            continue
        return record.id


async def cancel_run(database: Database, run_id: str, search_id: str) -> None:
    record: Any = await RunTable(database).request_cancel(run_id)
    assert record.state == "cancelled"
    await SearchTable(database).cancel_unwanted(search_id)


async def goes_on(database: Database, search_id: str) -> bool:
    return not (await found_in(SearchTable(database), search_id)).cancel_requested


async def test_the_last_run_that_waits_for_a_search_cancels_it(database: Database) -> None:
    search = await run_asks(database, "one")
    assert {await run_asks(database, "two"), await run_asks(database, "three")} == {search}
    for run_id, left in (("two", True), ("one", True), ("three", False)):
        await cancel_run(database, run_id, search)
        assert await goes_on(database, search) == left
    assert await run_asks(database, "later") == "of-later"


@pytest.mark.parametrize("client_is_first", [True, False])
async def test_a_cancelled_run_keeps_a_search_that_a_client_submitted_too(
    database: Database, client_is_first: bool
) -> None:
    asking = [client_asks, run_asks] if client_is_first else [run_asks, client_asks]
    first, search = [await asks(database, "run") for asks in asking]
    assert search == first
    await cancel_run(database, "run", search)
    assert await goes_on(database, search)


async def test_a_request_that_joins_a_search_during_its_cancellation_gets_a_live_search(
    databases: list[Database],
) -> None:
    first = await run_asks(databases[0], "first")
    for turn in range(6):
        _, theirs, mine = await asyncio.gather(
            cancel_run(databases[0], "first" if turn == 0 else f"run-{turn - 1}", first),
            run_asks(databases[1], f"run-{turn}"),
            client_asks(databases[2], f"client-{turn}") if turn % 2 else asyncio.sleep(0),
        )
        assert await goes_on(databases[0], theirs)
        if mine is not None:
            assert await goes_on(databases[0], mine)
        first = theirs
