"""A search with several submitters, on every kind of database: a cancelled run leaves it to the others."""

from __future__ import annotations

import asyncio

import pytest
from support.stored import a_run, a_search, found_in
from zbv_service.database import Database, RunTable, SearchGone, SearchTable

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
    record = await RunTable(database).request_cancel(run_id)
    assert record is not None
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
    any_database_url: str,
) -> None:
    databases = [Database(any_database_url) for _ in range(3)]
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
    for database in databases:
        await database.close()
