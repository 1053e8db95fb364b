"""Requests with an Idempotency-Key, and discarded searches, on every kind of database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select
from support.stored import a_plan, a_search
from zbv_service.database import (
    Database,
    KeyReused,
    PlanTable,
    SearchDiscarded,
    SearchEventTable,
    SearchTable,
)
from zbv_service.database.models import IdempotencyRow
from zbv_service.records.searches import NamedRequest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(any_database_url: str) -> AsyncIterator[Database]:
    opened = Database(any_database_url)
    yield opened
    await opened.close()


def named(name: str = "name", body: str = "body", seconds: float = 60) -> NamedRequest:
    return NamedRequest(name, body, datetime.now(UTC) + timedelta(seconds=seconds))


async def names(database: Database) -> int:
    async with database.reading() as session:
        return await session.scalar(select(func.count()).select_from(IdempotencyRow)) or 0


async def test_a_key_returns_its_search_even_after_a_cancellation(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a", "key"), named())
    await table.request_cancel("a")
    again, is_new = await table.add(a_search("b", "key"), named())
    assert (again.id, again.state, is_new) == ("a", "cancelled", False)
    other, is_new = await table.add(a_search("c", "key"), named("another"))
    assert (other.id, is_new) == ("c", True)


async def test_a_key_of_another_body_is_refused_and_stores_nothing(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"), named())
    with pytest.raises(KeyReused):
        await table.add(a_search("b"), named(body="another"))
    assert await table.get("b") is None


async def test_a_shared_search_is_stored_under_both_keys(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a", "key"), named("one"))
    shared, is_new = await table.add(a_search("b", "key"), named("two"))
    assert (shared.id, is_new) == ("a", False)
    await table.request_cancel("a")
    assert (await table.add(a_search("c", "key"), named("two")))[0].id == "a"


async def test_a_key_outlives_a_discarded_search(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"), named())
    assert await table.discard("a")
    with pytest.raises(SearchDiscarded):
        await table.add(a_search("b"), named())


async def test_keys_expire_and_can_be_used_again(database: Database) -> None:
    table = SearchTable(database)
    for index in range(3):
        await table.add(a_search(f"old{index}"), named(f"old{index}", seconds=-1))
    again, is_new = await table.add(a_search("new", "other"), named("old2", "another body"))
    assert (again.id, is_new) == ("new", True)
    assert await names(database) == 3


async def test_many_simultaneous_requests_with_one_key_are_one_search(
    database: Database, any_database_url: str
) -> None:
    second = Database(any_database_url)
    tables = [SearchTable(database), SearchTable(second)]
    # With different request keys, so that only the Idempotency-Key makes them one search.
    found = await asyncio.gather(
        *(tables[index % 2].add(a_search(f"s{index}"), named()) for index in range(20))
    )
    assert len({record.id for record, _ in found}) == 1
    assert sum(is_new for _, is_new in found) == 1
    await second.close()


async def test_discarding_removes_everything_except_the_plan(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a", "key"))
    claim = await table.claim("me", 60)
    assert claim is not None
    assert await table.finished("a", claim.fence, a_plan("p"))
    assert await table.discard("a")
    assert not await table.discard("a")
    assert await table.get("a") is None
    assert await SearchEventTable(database).after({"a": 0}) == []
    assert await PlanTable(database).document("p") == b"document"
    assert (await table.add(a_search("b", "key")))[1]


async def test_writes_to_a_discarded_search_are_ignored(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"))
    claim = await table.claim("me", 60)
    assert claim is not None
    assert await table.discard("a")
    assert await table.renew("me", {"a": claim.fence}, 60) == set()
    assert not await table.finished("a", claim.fence, a_plan("p"))
    assert await PlanTable(database).document("p") is None
    assert not await table.retry("a", claim.fence, None, "process-died", 1, {})
    assert not await table.release("a", claim.fence, None)


async def test_the_caller_is_stored(database: Database) -> None:
    table = SearchTable(database)
    record, _ = await table.add(replace(a_search("a"), created_by="ci"), named())
    assert record.created_by == "ci"
