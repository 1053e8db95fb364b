"""The database: tables from migrations, whole transactions, leases that fence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.exc import IntegrityError
from zbv_service.database import AgentTable, Database, DatabaseUnusable, PlanTable, RunTable, SearchTable
from zbv_service.database.migrate import upgrade
from zbv_service.database.models import Base
from zbv_service.database.url import async_url
from zbv_service.records import NewPlan, NewSearch, PlanSummary, Update

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    await opened.migrate()
    yield opened
    await opened.close()


def a_search(name: str, key: str | None = None) -> NewSearch:
    return NewSearch(name, key or name, b"problem", {}, {}, datetime.now(UTC))


def a_plan(name: str = "p") -> NewPlan:
    now = datetime.now(UTC)
    summary = PlanSummary(name, 2, 4, "v", "span", 3.0, 2.0, 0.5, "feasible", 0.1, "fake", "us", now)
    return NewPlan(summary, b"document")


BETTER = Update(5.0, 4.0, 0.25, "m", b"ranks")


def test_migrations_build_the_tables_that_the_code_uses() -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as connection, connection.begin():
        upgrade(connection)
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    engine.dispose()
    assert differences == []


def test_every_version_can_be_upgraded_from() -> None:
    versions = sorted(
        path.stem[1:5]
        for path in (Path(__file__).parents[2] / "service/zbv_service/database/migrations/versions").glob(
            "v*.py"
        )
    )
    assert versions
    for version in versions:
        engine = create_engine("sqlite://")
        with engine.connect() as connection, connection.begin():
            upgrade(connection, version)
            upgrade(connection)
            assert _version(connection) == versions[-1]
            tables = {"searches", "plans", "agents", "runs", "run_nodes", "run_events", "run_parts"}
            assert tables <= set(inspect(connection).get_table_names())
        engine.dispose()


def _version(connection: Connection) -> str:
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())


async def test_migrating_twice_or_at_once_changes_nothing(database_url: str) -> None:
    opened = [Database(database_url) for _ in range(8)]
    await asyncio.gather(*(each.migrate() for each in opened))
    await opened[0].migrate()
    assert await SearchTable(opened[1]).newest(1) == []
    for each in opened:
        await each.close()


async def test_a_database_of_a_newer_version_is_left_alone(database: Database) -> None:
    async with database.writing() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match="9999"):
        await database.migrate()


async def test_sqlite_writes_ahead_waits_for_others_and_checks_references(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/zbv.db")
    await database.migrate()
    for _ in range(2):  # the connection of the migration is not among those that others get
        async with database.reading() as session:
            found = [
                (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
                for name in ("journal_mode", "busy_timeout", "foreign_keys")
            ]
        assert found == ["wal", 30_000, 1]
    await database.close()


async def test_a_database_with_runs_keeps_them_when_it_is_upgraded(tmp_path: Path) -> None:
    """Version 3 copies the table of runs, to which those of agents and nodes refer."""
    path = tmp_path / "zbv.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection, connection.begin():
        upgrade(connection, "0002")
        for statement in OLD_ROWS:
            connection.execute(text(statement))
    engine.dispose()
    database = Database(f"sqlite:///{path}")
    await database.migrate()
    run = await RunTable(database).get("r")
    assert run is not None
    assert (run.plan_id, run.search_id, [node.agent_id for node in run.members]) == ("p", None, ["a"])
    agent = await AgentTable(database).get("a")
    assert agent is not None
    assert agent.run_id == "r"
    with pytest.raises(IntegrityError):
        async with database.writing() as session:
            await session.execute(text("DELETE FROM runs"))
    await database.close()


_AT = "'2030-01-01 00:00:00'"
OLD_ROWS = (
    f"INSERT INTO plans VALUES ('p', x'00', 2, 4, 'v', 'span', 1, 1, 0, 'optimal', 0, 'm', NULL, {_AT})",
    "INSERT INTO runs VALUES ('r', 'running', 'p', '{}', 1, 2, 5, '{}', 0, 0, 0, NULL, "
    f"{_AT}, {_AT}, {_AT}, NULL)",
    f"INSERT INTO agents VALUES ('a', 'n', 'h', 1, 2, '[]', '{{}}', '[]', 'live', 'r', {_AT}, {_AT})",
    "INSERT INTO run_nodes VALUES ('r', 0, 0, 'a', 'n', 'h:1', 'running', NULL, '[]', '[]', NULL)",
)


async def test_a_block_that_raises_stores_nothing(database: Database) -> None:
    async def change_and_fail() -> None:
        async with database.writing() as session:
            await session.execute(text("UPDATE alembic_version SET version_num = 'x'"))
            raise LookupError

    with pytest.raises(LookupError):
        await change_and_fail()
    async with database.reading() as session:
        assert (await session.execute(text("SELECT version_num FROM alembic_version"))).scalar_one() != "x"


async def test_many_writers_at_once_all_succeed(database: Database, database_url: str) -> None:
    second = Database(database_url)  # as another process has its own connections
    tables = [SearchTable(database), SearchTable(second)]
    await asyncio.gather(*(tables[index % 2].add(a_search(f"s{index}")) for index in range(40)))
    claims = await asyncio.gather(*(tables[index % 2].claim("me", 60) for index in range(41)))
    ids = [claim.id for claim in claims if claim is not None]
    assert sorted(ids) == sorted(f"s{index}" for index in range(40))
    await second.close()


async def test_searches_are_claimed_oldest_first(database: Database) -> None:
    table = SearchTable(database)
    for name in "bac":
        await table.add(a_search(name))
    claims = [await table.claim("me", 60) for _ in range(4)]
    assert [claim and claim.id for claim in claims] == ["b", "a", "c", None]


async def test_a_request_is_stored_once_until_it_is_given_up(database: Database) -> None:
    table = SearchTable(database)
    _, first_is_new = await table.add(a_search("a", "key"))
    second, second_is_new = await table.add(a_search("b", "key"))
    assert (first_is_new, second_is_new, second.id) == (True, False, "a")
    await table.request_cancel("a")
    third, third_is_new = await table.add(a_search("c", "key"))
    assert (third_is_new, third.id) == (True, "c")


async def test_only_the_current_owner_writes(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"))
    old = await table.claim("old", 60)
    assert old is not None
    assert await table.progressed("a", old.fence, BETTER)
    assert await table.requeue_of({"old"}) == 1
    new = await table.claim("new", 60)
    assert new is not None
    assert (new.fence, new.attempts, new.incumbent) == (old.fence + 1, 2, b"ranks")

    assert await table.renew("old", {"a": old.fence}, 60) == (set(), set())
    assert not await table.progressed("a", old.fence, BETTER)
    assert not await table.release("a", old.fence, None)
    assert not await table.crashed("a", old.fence, 1, {})
    assert not await table.ended("a", old.fence, "failed", {})
    assert not await table.finished("a", old.fence, a_plan())
    record = await table.get("a")
    assert record is not None
    assert (record.state, record.crashes, record.plan_id) == ("running", 0, None)

    assert await table.renew("new", {"a": new.fence}, 60) == ({"a"}, set())
    assert await table.finished("a", new.fence, a_plan())
    assert not await table.finished("a", new.fence, a_plan())


async def test_a_lease_that_is_renewed_does_not_end(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"))
    claim = await table.claim("me", 0.0)
    assert claim is not None
    await table.renew("me", {"a": claim.fence}, 60)
    assert await table.requeue_expired() == 0
    await table.renew("me", {"a": claim.fence}, -1.0)
    assert await table.requeue_expired() == 1


async def test_a_renewal_brings_back_what_was_cancelled(database: Database) -> None:
    table = SearchTable(database)
    await table.add(a_search("a"))
    claim = await table.claim("me", 60)
    assert claim is not None
    record = await table.request_cancel("a")
    assert record is not None
    assert record.state == "running"
    assert await table.renew("me", {"a": claim.fence}, 60) == ({"a"}, {"a"})
    assert await table.finished("a", claim.fence, a_plan())
    ended = await table.get("a")
    assert ended is not None
    assert (ended.state, ended.plan_id) == ("cancelled", "p")


async def test_a_plan_is_stored_once(database: Database) -> None:
    table = PlanTable(database)
    assert await table.add(a_plan())
    assert not await table.add(NewPlan(a_plan().summary, b"another document"))
    assert await table.document("p") == b"document"
    assert await table.document("q") is None


async def test_moments_come_back_in_utc(database: Database) -> None:
    table = SearchTable(database)
    new = a_search("a")
    await table.add(new)
    record = await table.get("a")
    assert record is not None
    assert (record.created_at, record.created_at.tzinfo) == (new.created_at, UTC)


@pytest.mark.parametrize(
    ("url", "message"),
    [("zbv.db", "sqlite:///"), ("mysql://h/d", "mysql"), ("", "database URL"), ("sqlite//x", "database URL")],
)
def test_a_wrong_url_is_refused_with_the_remedy(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async_url(url)


@pytest.mark.parametrize("url", ["sqlite:///x.db", "sqlite+aiosqlite:///x.db"])
def test_the_driver_is_filled_in(url: str) -> None:
    assert str(async_url(url)) == "sqlite+aiosqlite:///x.db"
