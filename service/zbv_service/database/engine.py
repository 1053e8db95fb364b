"""One database: its engine, its transactions, and bringing its tables up to date."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from alembic.util.exc import CommandError
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.util import await_only

from zbv_service.database.migrate import upgrade
from zbv_service.database.url import async_url

BUSY_SECONDS = 30.0
"""How long a SQLite writer waits for another one before it gives up."""

_RETRY_SECONDS = 0.02
_MIGRATION_LOCK = 6_451_203
"""Names the lock under which one service at a time migrates a PostgreSQL database; any number would do."""


class DatabaseUnusable(Exception):
    """The database cannot be opened or brought up to date; the message says which, why and what to do."""


class Database:
    """An open database. Call :meth:`migrate` before anything else, and :meth:`close` at the end."""

    def __init__(self, url: str):
        parsed = async_url(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self._engine = create_async_engine(parsed, connect_args={"timeout": BUSY_SECONDS})
            _prepare_sqlite(self._engine)
        else:
            self._engine = create_async_engine(parsed, pool_pre_ping=True, pool_timeout=BUSY_SECONDS)

    async def migrate(self) -> None:
        """Bring the tables to the newest version, from any older one or from nothing.

        Raises
        ------
        DatabaseUnusable
            When the database cannot be opened, is none, or is of a newer version than this code.
        """
        try:
            if self.is_sqlite:
                await asyncio.to_thread(_open_once, self._engine.url.database or ":memory:")
            async with self._engine.connect() as connection:
                await connection.execution_options(zbv_writes=True, zbv_migrates=True)
                async with connection.begin():
                    if not self.is_sqlite:  # whose writers wait for each other anyway
                        await connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
                    await connection.run_sync(upgrade)
                if self.is_sqlite:
                    await connection.invalidate()  # no later user gets one without foreign keys
        except (SQLAlchemyError, CommandError, sqlite3.Error) as error:
            shown = self._engine.url.render_as_string(hide_password=True)
            reason = getattr(error, "orig", None) or error
            needs = "Its directory must exist and be writable" if self.is_sqlite else "It must exist"
            raise DatabaseUnusable(
                f"cannot use the database {shown}: {reason}. {needs}, and it must come from this version of "
                f"the service or an older one."
            ) from error

    async def ping(self) -> None:
        """Raise when the database does not answer."""
        async with self._engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A session that sees one state of the database and changes nothing."""
        async with AsyncSession(self._engine, expire_on_commit=False) as session:
            yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A session that commits when its block ends, and rolls back when it raises."""
        async with AsyncSession(self._engine, expire_on_commit=False) as session, session.begin():
            await session.connection(execution_options={"zbv_writes": True})
            yield session


def _open_once(path: str) -> None:
    """Raise what opening raises. The asynchronous driver raises it too, and then its thread outlives the loop
    and complains on standard error."""
    sqlite3.connect(path, timeout=BUSY_SECONDS).close()


def _prepare_sqlite(engine: AsyncEngine) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # The driver's own transactions start too late: only before the first write, and then as
        # readers that may fail to become writers. Ours are begun below, as what they are.
        connection.isolation_level = None
        cursor = connection.cursor()
        _write_ahead(cursor)
        for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("zbv_migrates", False):
            # SQLite alters a table by copying it, and others refer to the one that goes meanwhile. The
            # switch works only outside of a transaction.
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("zbv_writes", False) else "BEGIN")


def _write_ahead(cursor: Any) -> None:
    """Switch a new database to write-ahead logging; it stays that way.

    The switch does not wait for others as writes do: when several connections open a new database at once,
    SQLite answers "locked" at once. So it is waited for here.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        await_only(asyncio.sleep(_RETRY_SECONDS))
