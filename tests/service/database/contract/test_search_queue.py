"""The queue serves tokens in rotation, and leases depend on the database's clock only."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.clocks import clock_off_by
from support.stored import a_plan, a_search, claimed, found_in, next_of
from zbv_service.database import Database, SearchTable
from zbv_service.database.tally import tally
from zbv_service.records.lists import SearchListQuery
from zbv_service.records.searches import Claim, Outcome, Update


@pytest.fixture
def tables(databases: list[Database]) -> list[SearchTable]:
    """Of four services on one database."""
    return [SearchTable(each) for each in databases]


async def queue(table: SearchTable, caller: str | None, *names: str) -> None:
    for name in names:
        await table.add(a_search(name, created_by=caller))


async def claimed_id(table: SearchTable, **options: int | None) -> str | None:
    claim = await table.claim("me", 60, **options)  # type: ignore[arg-type]
    return None if claim is None else claim.id


async def finish(table: SearchTable, claim: Claim) -> None:
    assert await table.finished(claim.id, claim.fence, Outcome.of(a_plan(f"plan-{claim.id}")))


async def test_tokens_are_served_in_rotation_and_their_searches_in_order(table: SearchTable) -> None:
    await queue(table, "flood", *(f"f{index}" for index in range(6)))
    await queue(table, "other", "o0", "o1")
    await queue(table, None, "n0")
    order = [await claimed_id(table) for _ in range(10)]
    assert order == ["f0", "o0", "n0", "f1", "o1", "f2", "f3", "f4", "f5", None]


async def test_a_new_token_waits_for_one_round_only(table: SearchTable) -> None:
    await queue(table, "flood", *(f"f{index}" for index in range(30)))
    for _ in range(10):
        await finish(table, await next_of(table))
    await queue(table, "late", "l0", "l1", "l2")
    assert (await found_in(table, "l1")).queued_before == 3, "f10, l0 and f11"
    assert [await claimed_id(table) for _ in range(6)] == ["f10", "l0", "f11", "l1", "f12", "l2"]


async def test_a_search_that_is_queued_again_keeps_its_turn(table: SearchTable) -> None:
    await queue(table, "a", "a0", "a1")
    await queue(table, "b", "b0", "b1")
    first = await next_of(table)
    await table.requeue(first.id, first.fence, None)
    assert [await claimed_id(table) for _ in range(4)] == ["a0", "b0", "a1", "b1"]


async def test_a_token_with_its_share_running_waits_while_other_tokens_wait(table: SearchTable) -> None:
    await queue(table, "busy", "b0", "b1", "b2", "b3")
    assert [await claimed_id(table, share=2) for _ in range(3)] == ["b0", "b1", "b2"], "nobody else waits"
    await queue(table, "late", "l0", "l1", "l2")
    await queue(table, None, "n0")
    assert [await claimed_id(table, share=2) for _ in range(3)] == ["l0", "n0", "l1"]
    # Now every token has its share or nothing queued. A free slot is used all the same.
    assert await claimed_id(table, share=2) == "b3"
    assert await claimed_id(table, share=2) == "l2"
    assert await claimed_id(table, share=2) is None


async def test_a_caller_without_a_turn_waits_although_nobody_else_does(table: SearchTable) -> None:
    await queue(table, "busy", "b0")
    await queue(table, None, "n0")
    assert await table.claim("me", 60, full={"busy", None}) is None
    await queue(table, "other", "o0")
    found: Any = await table.claim("me", 60, full={"busy", None})
    assert (found.id, found.created_by) == ("o0", "other")


async def test_services_that_share_their_slots_count_the_running_searches_of_a_caller_together(
    tables: list[SearchTable],
) -> None:
    await queue(tables[0], "busy", *(f"b{index}" for index in range(8)))
    claims = await asyncio.gather(*(each.claim(f"s{n}", 60, most=3) for n, each in enumerate(tables)))
    assert len(list(filter(None, claims))) == 3
    await queue(tables[0], "late", "l0")
    assert await claimed_id(tables[1], most=3) == "l0"


async def test_a_cancelled_search_with_an_incumbent_waits_only_for_other_cancelled_searches(
    table: SearchTable,
) -> None:
    await queue(table, "a", "a0", "a1")
    first, other = await next_of(table), await next_of(table)
    assert await claimed_id(table, cancelled_only=True) is None
    await table.requeue(other.id, other.fence, None)
    await table.requeue("a0", first.fence, Update(10.0, 5.0, "m", b"ranks"))
    await table.request_cancel("a0")
    await queue(table, "b", "b0")
    claim: Any = await table.claim("me", 60, cancelled_only=True)
    assert (claim.id, claim.cancel_requested, claim.incumbent) == ("a0", True, b"ranks")
    assert await claimed_id(table, cancelled_only=True) is None


async def test_services_on_one_database_share_the_rotation_of_tokens(tables: list[SearchTable]) -> None:
    await queue(tables[0], "flood", *(f"f{index:02}" for index in range(40)))
    await queue(tables[1], "other", *(f"o{index:02}" for index in range(10)))
    found: list[str] = []
    for _ in range(5):
        claims = await asyncio.gather(*(each.claim(f"s{n}", 60) for n, each in enumerate(tables)))
        found += [claim.id for claim in claims if claim is not None]
    assert len(found) == len(set(found)) == 20
    served = Counter(name[0] for name in found)
    # Two claims at the same time may take the searches of one turn in either order.
    assert abs(served["f"] - served["o"]) <= 2


MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_keeps_its_searches_for_the_usual_time(
    table: SearchTable, hours: float
) -> None:
    """It requeues no search of others, and its own leases last as long as others'."""
    with clock_off_by(hours):
        claim = await claimed(table)
    assert await table.requeue_lost() == 0
    with clock_off_by(hours):
        assert await table.requeue_lost() == 0
        assert await table.renew("me", {"a": claim.fence}, 60) == {"a"}
    assert await table.requeue_lost() == 0
    with clock_off_by(hours):
        assert await table.renew("me", {"a": claim.fence}, 0.01) == {"a"}
    await asyncio.sleep(0.02)
    assert await table.requeue_lost() == 1


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_service_with_a_wrong_clock_stores_right_times(
    database: Database, table: SearchTable, hours: float
) -> None:
    await table.add(a_search("before"))
    with clock_off_by(hours):
        await table.add(a_search("a"))
        assert (await tally(database)).queue_age < 60
        await table.request_cancel("before")
        claim = await next_of(table)
        assert await table.finished("a", claim.fence, Outcome.of(a_plan("p")))
    found, cancelled = await found_in(table), await found_in(table, "before")
    times = (found.created_at, found.started_at, found.finished_at, found.updated_at, cancelled.finished_at)
    assert all(moment and abs(moment - datetime.now(UTC)) < MINUTE for moment in times)


async def test_searches_created_at_the_same_time_are_listed_in_order_of_submission(
    table: SearchTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's clock counts milliseconds."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)

    async def now(_database: Database, _session: object) -> datetime:
        return noon

    monkeypatch.setattr(Database, "now", now)
    names = list("zmaqkfyb")
    for name in names:
        await table.add(a_search(name))
    assert [record.id for record in (await table.page(SearchListQuery())).items] == names[::-1]
    # After the clock was set back, later searches sort earlier; their times are not changed.
    noon -= timedelta(hours=1)
    await table.add(a_search("back"))
    back = await found_in(table, "back")
    assert back.created_at == noon
