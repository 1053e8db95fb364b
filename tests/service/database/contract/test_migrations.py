"""Migrations of an empty database, of every earlier version with rows, and by several services at once."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import IntegrityError
from support.databases import VERSIONS
from support.stored import a_search
from zbv_service.database import AgentTable, Database, DatabaseUnusable, PlanTable, RunTable, SearchTable
from zbv_service.database.migrate import upgrade
from zbv_service.database.models import Base
from zbv_service.database.url import async_url
from zbv_service.documents.packing import unpack
from zbv_service.records.searches import NamedRequest, SearchFilter

_AT = "'2030-01-01 00:00:00'"
_PLAN = zlib.compress(json.dumps({"problem": {"pp_degree": 2}}).encode()).hex()
_SUMMARY = """'{"pp_degree": 2, "microbatches": 4, "placement": "v", "objective": "span"}'"""
_ROWS: dict[str, tuple[str, ...]] = {
    "0001": (
        f"INSERT INTO plans VALUES ('p', @plan, 2, 4, 'v', 'span', 1, 1, 0, 'optimal', 0, 'm', NULL, {_AT})",
        "INSERT INTO searches (id, request_key, state, summary, options, problem, objective, plan_id, "
        "cancel_requested, attempts, crashes, fence, created_at, updated_at) VALUES "
        f"('s', 'k', 'done', {_SUMMARY}, '{{}}', @bytes, 1, 'p', @false, 1, 0, 1, {_AT}, {_AT}), "
        f"('t', 'l', 'queued', {_SUMMARY}, '{{}}', @bytes, NULL, NULL, @false, 0, 0, 0, {_AT}, {_AT})",
    ),
    "0002": (
        "INSERT INTO runs VALUES ('r', 'running', 'p', '{}', 1, 2, 5, '{}', 0, @false, @false, NULL, "
        f"{_AT}, {_AT}, {_AT}, NULL)",
        f"INSERT INTO agents VALUES ('a', 'n', 'h', 1, 2, '[]', '{{}}', '[]', 'live', 'r', {_AT}, {_AT})",
        "INSERT INTO run_nodes VALUES ('r', 0, 0, 'a', 'n', 'h:1', 'running', NULL, '[]', '[]', NULL)",
    ),
    "0005": ("INSERT INTO idempotency_keys VALUES ('name', 'body', 's', '2999-01-01 00:00:00+00:00')",),
    "0010": (
        """UPDATE searches SET options = '{"seed": 1, "jitter": {"action": 0.5}}' WHERE id = 't'""",
        """UPDATE runs SET search_options = '{"seed": 2}'""",
    ),
}
"""Rows in the form of each version that wrote new ones. A later version also has the earlier rows."""


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Engine]:
    url = async_url(empty_database_url)
    is_sqlite = url.get_backend_name() == "sqlite"
    opened = create_engine(url.set(drivername="sqlite" if is_sqlite else url.drivername))
    yield opened
    opened.dispose()


def test_migrations_build_the_tables_that_the_code_uses(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin():
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, Base.metadata)
    assert differences == []


@pytest.mark.anyio
@pytest.mark.parametrize("version", _ROWS)
async def test_rows_of_every_version_survive_the_migration(
    engine: Engine, empty_database_url: str, version: str
) -> None:
    with engine.connect() as connection, connection.begin():
        write_as(connection, version)

    database = Database(empty_database_url)
    await database.migrate()
    searches = SearchTable(database)
    assert {record.id: record.state for record in (await searches.page(SearchFilter(), 9)).items} == {
        "s": "done",
        "t": "queued",
    }
    assert (await searches.problem("s"), await PlanTable(database).document("p")) == (
        b"\x00",
        bytes.fromhex(_PLAN),
    )
    claim = await searches.claim("me", 60)
    assert claim is not None
    assert claim.id == "t"
    if version >= "0002":
        # Version 3 copies the table of runs on SQLite, while other tables refer to it.
        run, agent = await RunTable(database).get("r"), await AgentTable(database).get("a")
        assert run is not None
        assert agent is not None
        assert (run.plan_id, run.search_id, [node.agent_id for node in run.members]) == ("p", None, ["a"])
        assert (agent.run_id, agent.owner) == ("r", None)
        with pytest.raises(IntegrityError):
            async with database.writing() as session:
                await session.execute(text("DELETE FROM runs"))
    if version >= "0005":
        again = NamedRequest("name", "body", datetime.now(UTC))
        assert (await searches.add(a_search("u"), again))[0].id == "s"
    if version >= "0010":
        record, options = await searches.get("t"), await RunTable(database).search_options("r")
        assert record is not None
        assert (record.options, record.jitter) == ({"seed": 1}, claim.jitter)
        assert unpack(claim.jitter or b"") == {"action": 0.5}
        assert unpack(options or b"") == {"seed": 2}
    await database.close()


def write_as(connection: Connection, version: str) -> None:
    """Bring a database to a version, with the rows of this version and of earlier ones."""
    if connection.dialect.name == "sqlite":
        values = {"@plan": f"x'{_PLAN}'", "@bytes": "x'00'", "@false": "0"}
    else:
        values = {"@plan": f"'\\x{_PLAN}'", "@bytes": "'\\x00'", "@false": "false"}
    for known in VERSIONS[: VERSIONS.index(version) + 1]:
        upgrade(connection, known)
        for statement in _ROWS.get(known, ()):
            for name, value in values.items():
                statement = statement.replace(name, value)
            connection.exec_driver_sql(statement)


@pytest.mark.anyio
async def test_migrating_twice_or_at_once_changes_nothing(empty_database_url: str) -> None:
    opened = [Database(empty_database_url) for _ in range(4)]
    await asyncio.gather(*(each.migrate() for each in opened))
    await opened[0].migrate()
    assert (await SearchTable(opened[1]).page(SearchFilter(), 1)).items == ()
    for each in opened:
        await each.close()


@pytest.mark.anyio
async def test_a_database_of_a_newer_version_is_refused(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    await database.migrate()
    async with database.writing() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match="9999"):
        await database.migrate()
    await database.close()
