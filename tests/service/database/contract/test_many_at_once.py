"""Queries for several rows at once, on every kind of database."""

from __future__ import annotations

from support.stored import a_plan, a_run, a_search
from zbv_service.database import Database, PartTable, PlanTable, RunTable, SearchTable
from zbv_service.records.runs import NewPart


async def test_the_best_plan_of_each_problem_is_found(any_database_url: str) -> None:
    database = Database(any_database_url)
    table = PlanTable(database)
    for name, value, problem in (
        ("a", 3.0, "one"),
        ("b", 2.0, "one"),
        ("c", 5.0, "two"),
        ("d", 1.0, "three"),
    ):
        await table.add(a_plan(name, value, problem))
    best = await table.best_of(["one", "two", "none"])
    assert {key: (plan.plan_id, plan.value) for key, plan in best.items()} == {
        "one": ("b", 2.0),
        "two": ("c", 5.0),
    }
    assert await table.best_of([]) == {}
    await database.close()


async def test_the_searches_of_several_requests_are_found(any_database_url: str) -> None:
    database = Database(any_database_url)
    table = SearchTable(database)
    for name in ("1", "2", "3"):
        await table.add(a_search(name, f"key-{name}"))
    await table.request_cancel("3")  # releases its key
    found = await table.of_requests(["key-1", "key-2", "key-3", "key-4"])
    assert {key: record.id for key, record in found.items()} == {"key-1": "1", "key-2": "2"}
    await database.close()


async def test_the_artifacts_of_a_run_are_listed_without_their_content(any_database_url: str) -> None:
    database = Database(any_database_url)
    await PlanTable(database).add(a_plan("f" * 64))
    await RunTable(database).add(a_run("run", ranks_per_node=2))
    parts = PartTable(database)
    await parts.put(NewPart("run", 1, 0, "log", b"text"))
    await parts.put(NewPart("run", 0, 1, "trace", b"body", "f" * 64, 1, 0, 7))
    await parts.put(NewPart("run", 0, 0, "trace", b"body", "f" * 64, 0, 0, 6))
    listed = await parts.index("run")
    assert [(each.generation, each.rank, each.kind, each.last_step) for each in listed] == [
        (0, 0, "trace", 6),
        (0, 1, "trace", 7),
        (1, 0, "log", None),
    ]
    assert all(each.updated_at.tzinfo is not None for each in listed)
    assert await parts.index("other") == []
    await database.close()
