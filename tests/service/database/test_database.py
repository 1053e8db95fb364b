"""Databases: their URLs, files and migrations, and a server that stops and returns."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import NullPool, create_engine, text
from support.databases import PostgresDatabases
from support.postgres import a_server
from support.serving import PLAN, Serving
from support.tokens import add, bearer
from zbv_service.database import Database, DatabaseAway, DatabaseUnusable, SearchTable
from zbv_service.database.engine import Base
from zbv_service.database.migrate import upgrade
from zbv_service.records.lists import SearchListQuery
from zbv_service.security.tokens import TokenText
from zbv_service.settings import async_url


async def test_sqlite_uses_a_write_ahead_log_a_busy_timeout_and_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/zbv.db")
    await database.migrate()
    for _ in range(2):  # nobody gets the connection of the migration
        async with database.writing() as session:
            found = [
                (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
                for name in ("journal_mode", "busy_timeout", "foreign_keys")
            ]
        assert found == ["wal", 30_000, 1]
    await database.close()


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("before", ["nothing", "open to all"])
async def test_sqlite_files_are_private_with_any_umask(
    tmp_path: Path, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    umask = os.umask(0)
    try:
        database = Database(f"sqlite:///{tmp_path}/zbv.db")
        if before == "open to all":  # the files of an earlier version that was killed
            connection = sqlite3.connect(tmp_path / "zbv.db")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE other (x)")
            assert set(modes(tmp_path).values()) == {0o644}
        await database.migrate()
        async with database.writing() as session:
            await session.execute(text("DELETE FROM plans"))
        assert modes(tmp_path) == dict.fromkeys(("zbv.db", "zbv.db-wal", "zbv.db-shm"), 0o600)
        assert ("had mode 644" in caplog.text) == (before == "open to all")
        await database.close()
    finally:
        os.umask(umask)


def test_migrations_build_the_tables_that_the_code_uses(empty_database_url: str) -> None:
    url = async_url(empty_database_url)
    is_sqlite = url.get_backend_name() == "sqlite"
    engine = create_engine(url.set(drivername="sqlite" if is_sqlite else url.drivername), poolclass=NullPool)
    with engine.connect() as connection, connection.begin():
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, Base.metadata)
    assert differences == []


async def test_migrating_twice_or_at_once_changes_nothing_and_a_newer_version_is_refused(
    empty_database_url: str,
) -> None:
    opened = [Database(empty_database_url) for _ in range(4)]
    await asyncio.gather(*(each.migrate() for each in opened))
    await opened[0].migrate()
    assert (await SearchTable(opened[1]).page(SearchListQuery(limit=1))).items == ()
    async with opened[2].writing() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match="9999"):
        await opened[3].migrate()
    for each in opened:
        await each.close()


async def test_a_service_survives_a_restart_of_its_database(
    serving: Serving, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_server() as server, PostgresDatabases(server.url).migrated() as url:
        async with serving("held", database=url, auth="tokens") as service:
            service.http.headers.update(await add(service, "admin"))
            imported = await service.http.post("/v1/plans", json=PLAN)
            rank = f"/v1/plans/{imported.json()['plan_id']}/ranks/0"
            assert (await service.http.get(rank)).status_code == 200
            search_id = await service.begun()

            await asyncio.to_thread(server.stop)
            (directory / "release").touch()  # it ends while its plan cannot be stored
            for answer in (await service.http.get(f"/v1/searches/{search_id}"), await service.submit(seed=1)):
                assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
                assert int(answer.headers["Retry-After"]) >= 1
            # Cached plans are served to known tokens; other tokens get no access.
            assert (await service.http.get(rank)).status_code == 200
            unknown = await service.http.get(rank, headers=bearer(str(TokenText.new())))
            assert (unknown.status_code, unknown.json()["type"]) == (503, "/errors/not-ready")
            with caplog.at_level("INFO"):
                for _ in range(3):
                    assert (await service.http.get("/readyz")).status_code == 503
            assert (await service.http.get("/healthz")).status_code == 200
            (said,) = [line for line in caplog.records if "not ready" in line.getMessage()]
            assert "database" in said.getMessage()
            assert said.exc_info is None

            await asyncio.to_thread(server.start)
            with caplog.at_level("INFO"):
                while not (await service.http.get("/readyz")).is_success:
                    pass
            assert any("ready again" in line.getMessage() for line in caplog.records)
            ended = await service.ended(search_id)
            assert (ended["state"], ended["attempts"]) == ("done", 1)
            later = (await service.submit(seed=2)).json()["id"]
            assert (await service.ended(later))["state"] == "done"


@pytest.mark.parametrize(
    "losing",
    [
        "SET LOCAL idle_in_transaction_session_timeout = 1",
        "SET TRANSACTION READ ONLY; CREATE TABLE unused (x int)",
        "SELECT pg_terminate_backend(pg_backend_pid())",
        "SET LOCAL statement_timeout = 1; SELECT pg_sleep(1)",
    ],
)
async def test_a_server_that_ends_transactions_is_away(postgres: PostgresDatabases, losing: str) -> None:
    """A service that paused in a transaction, a server that became a replica, and one that stops."""
    with postgres.migrated() as url:
        database = Database(url)

        async def write(*statements: str) -> None:
            async with database.writing() as session:
                for statement in statements:
                    await session.execute(text(statement))
                await asyncio.sleep(0.1)
                await session.execute(text("SELECT 1"))

        with pytest.raises(DatabaseAway):
            await write(*losing.split("; "))
        await write()
        await database.close()
