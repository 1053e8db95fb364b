"""Discarded searches, on every kind of database."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.stored import a_plan, a_search
from zbv_service.database import Database, PlanTable, SearchEventTable, SearchTable


@pytest.fixture
async def database(any_database_url: str) -> AsyncIterator[Database]:
    opened = Database(any_database_url)
    yield opened
    await opened.close()


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
    assert not await table.requeue("a", claim.fence, None, "process-died", 1, {})
    assert not await table.requeue("a", claim.fence, None)
