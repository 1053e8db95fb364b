"""The columns that new versions fill in for earlier rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, create_engine, text
from zbv_service.database import AgentTable, Database, PlanTable, RunTable, SearchEventTable, SearchTable
from zbv_service.database.migrate import upgrade
from zbv_service.database.url import async_url
from zbv_service.documents.packing import problem_key
from zbv_service.records.searches import SearchFilter

pytestmark = pytest.mark.anyio

_AT = "'2030-01-01 00:00:00'"
_SUMMARY = """'{"pp_degree": 8, "microbatches": 4, "placement": "v", "objective": "makespan"}'"""
_PROBLEM = {"pp_degree": 8, "microbatches": 4}
_PLAN = zlib.compress(json.dumps({"problem": _PROBLEM, "ranks": []}).encode())


def _searches() -> str:
    columns = (
        "id, state, summary, options, problem, objective, lower_bound, gap, plan_id, cancel_requested, "
        "attempts, crashes, fence, created_at, updated_at"
    )
    rows = (
        f"('{name}', '{state}', {_SUMMARY}, '{{}}', :bytes, 3, 2, 0.5, {plan}, :no, 1, 0, 1, {_AT}, {_AT})"
        for name, state, plan in (("a", "done", "'p'"), ("b", "running", "NULL"))
    )
    return f"INSERT INTO searches ({columns}) VALUES {', '.join(rows)}"


@contextmanager
def version(database_url: str, revision: str) -> Iterator[Connection]:
    """An empty database of an earlier version."""
    url = async_url(database_url)
    is_sqlite = url.get_backend_name() == "sqlite"
    engine = create_engine(url.set(drivername="sqlite" if is_sqlite else url.drivername))
    with engine.connect() as connection, connection.begin():
        upgrade(connection, revision)
        yield connection
    engine.dispose()


async def test_earlier_agents_allow_no_scripts_and_earlier_runs_have_none(empty_database_url: str) -> None:
    agent = {
        "id, name, address, port, slots": "'a', 'a', 'h', 1, 1",
        "devices, versions, allowed_models": "'[]', '{}', '[]'",
        "state, created_at, seen_at": f"'live', {_AT}, {_AT}",
    }
    run = {
        "id, state, model, options": """'r', 'failed', '{"factory": "a.b:c"}', '{}'""",
        "nodes, ranks_per_node, steps, generation": "1, 1, 5, 0",
        "stop_requested, cancel_requested, failures, refusals": ":no, :no, '[]', '[]'",
        "created_at, updated_at": f"{_AT}, {_AT}",
    }
    with version(empty_database_url, "0008") as connection:
        for table, row in (("agents", agent), ("runs", run)):
            query = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(row.values())})"
            connection.exec_driver_sql(query.replace(":no", "false"))
    database = Database(empty_database_url)
    await database.migrate()
    found, kept = await AgentTable(database).get("a"), await RunTable(database).get("r")
    assert found is not None
    assert found.allowed_scripts == []
    assert kept is not None
    assert (kept.script, kept.program, kept.steps) == (None, "a.b:c", 5)
    await database.close()


async def test_rows_of_earlier_versions_are_found_and_followed_like_new_ones(
    empty_database_url: str,
) -> None:
    with version(empty_database_url, "0004") as connection:
        columns = "'p', :plan, 8, 4, 'v', 'makespan', 3, 2, 0.5, 'feasible', 0, 'm', NULL"
        connection.execute(text(f"INSERT INTO plans VALUES ({columns}, {_AT})"), {"plan": _PLAN})
        connection.execute(text(_searches()), {"bytes": b"", "no": False})
    database = Database(empty_database_url)
    await database.migrate()
    table = SearchTable(database)
    wanted = SearchFilter(pp_degree=8, microbatches=4, placement="v", objective="makespan")
    assert [record.id for record in (await table.page(wanted, 9)).items] == ["b", "a"]
    assert (await table.page(SearchFilter(objective="span"), 9)).items == ()
    best = await PlanTable(database).best(problem_key(_PROBLEM))
    assert best is not None
    assert best.plan_id == "p"

    events = await SearchEventTable(database).after({"a": 0, "b": 0})
    assert [(event.search_id, event.number, event.kind) for event in events] == [
        ("a", 1, "end"),
        ("b", 1, "state"),
    ]
    assert (events[0].data["state"], events[0].data["plan_id"], events[0].data["objective"]) == (
        "done",
        "p",
        3,
    )
    assert (events[1].data["state"], events[1].data["reason"]) == ("running", "upgraded")
    assert await table.requeue_of({"x"}) == 0
    assert (await table.request_cancel("b")) is not None
    assert [event.number for event in await SearchEventTable(database).after({"b": 1})] == [2]
    await database.close()
