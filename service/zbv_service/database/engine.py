"""One database: its engine, its transactions and its migration; and what all tables share."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar, TypeVarTuple

from alembic.util.exc import CommandError
from sqlalchemy import (
    JSON,
    URL,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Double,
    Engine,
    Row,
    Select,
    TypeDecorator,
    create_engine,
    event,
    func,
    select,
    text,
    type_coerce,
)
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionFree
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.util import await_only

from zbv_service.database.migrate import BUSY_SECONDS, make_private, open_once, upgrade
from zbv_service.settings import async_url, sqlite_file

POOLED, MORE_POOLED = 10, 20
"""Connections to a PostgreSQL server that the pool keeps, and how many more it may open under load."""
WAIT_SECONDS = 10.0
"""How long to wait for a free connection, and for a new one."""
STATEMENT_SECONDS = 30.0
"""Limits for PostgreSQL: the time of a statement, of waiting for a lock, and of an idle transaction."""

FILE_READERS = 4
"""Threads that read a SQLite file. Most queries take less than a millisecond; those of long lists queue."""

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RETRY_SECONDS = 0.02
_ONE_STATE = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
"""By default each statement of a PostgreSQL transaction sees the commits before that statement."""
_MIGRATION_LOCK = 6_451_203
"""The advisory lock under which one service at a time migrates PostgreSQL; the number is arbitrary."""


logger = logging.getLogger(__name__)


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. Reading adds the time zone for databases that do not store it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Reject naive moments, because their meaning depends on the machine."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"found the naive moment {value}; only moments with a time zone are stored.")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return moments in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """The declarative base of all tables."""

    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: JSON(), float: Double()}  # noqa: RUF012


def record_of(kind: Callable[..., R], row: Base, **values: Any) -> R:
    """A record with the values of a row's columns of the same names, and with other values."""
    known = {name: getattr(row, name) for name in _names(kind, type(row)) if name not in values}
    return kind(**known, **values)


def columns_of(kind: Callable[..., Any], table: type[Base]) -> tuple[Any, ...]:
    """The columns of a table that have the names of a record's fields, in their order."""
    return tuple(getattr(table, name) for name in _names(kind, table))


@cache
def _names(kind: Callable[..., Any], table: type[Base]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(kind).parameters if name in table.__table__.columns)


class DatabaseUnusable(Exception):
    """The database cannot be opened or migrated; the message says which one, why, and what to do."""


class DatabaseAway(Exception):
    """The database does not answer in time; it may be back in a moment.

    A write that was in progress may or may not be stored: the answer to a commit can get lost.
    """


class Database:
    """An open database. Call :meth:`migrate` before anything else, and :meth:`close` at the end."""

    def __init__(self, url: str):
        parsed = async_url(url)
        self._file = sqlite_file(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            # Sessions end their transactions, so a returned connection has nothing to roll back. By default
            # the pool would do it all the same, with two more hand-overs to the connection's thread.
            self._engine = create_async_engine(
                parsed, connect_args={"timeout": BUSY_SECONDS}, pool_reset_on_return=None
            )
            _begin_explicitly(self._engine.sync_engine, writes=True)
        else:
            self._engine = create_async_engine(parsed, **_postgres_options())
        self._failed_write: DatabaseAway | None = None
        self._readers = _Readers(parsed)
        clock = func.strftime("%Y-%m-%d %H:%M:%f000", "now") if self.is_sqlite else func.clock_timestamp()
        self.clock: ColumnElement[datetime] = type_coerce(clock, UtcDateTime())
        """The current time, in a query. Microseconds on PostgreSQL, milliseconds on SQLite."""

    async def migrate(self) -> None:
        """Migrate the tables to the newest version, from any older version or an empty database.

        Raises
        ------
        DatabaseUnusable
            The database cannot be opened, is not a database, or is newer than this code.
        """
        try:
            if self.is_sqlite:
                await asyncio.to_thread(open_once, str(self._file))
            async with self._engine.connect() as connection:
                await connection.execution_options(zbv_writes=True, zbv_migrates=True)
                async with connection.begin():
                    if not self.is_sqlite:  # SQLite writers exclude each other anyway
                        for limit in ("statement_timeout", "lock_timeout"):  # a migration may take long
                            await connection.execute(text(f"SET LOCAL {limit} = 0"))
                        await connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
                    await connection.run_sync(upgrade)
                if self.is_sqlite:
                    await connection.invalidate()  # nobody may reuse a connection without foreign keys
            if self._file is not None:
                await asyncio.to_thread(make_private, self._file)
        except (SQLAlchemyError, CommandError, sqlite3.Error) as error:
            shown = self._engine.url.render_as_string(hide_password=True)
            reason = getattr(error, "orig", None) or error
            needs = "Its directory must exist and be writable" if self.is_sqlite else "It must exist"
            raise DatabaseUnusable(
                f"cannot use the database {shown}: {reason}. {needs}, and it must come from this version of "
                f"the service or an older one."
            ) from error

    async def ping(self) -> None:
        """Raise :class:`DatabaseAway` if the database does not answer, or the last attempt to write failed.

        A database on a full disk can still be read. The service writes every few seconds by itself.
        """
        with _away():
            async with self._engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        if self._failed_write is not None:
            raise self._failed_write

    async def close(self) -> None:
        """Close every connection."""
        self._readers.close()
        await self._engine.dispose()

    async def rows(self, query: Select[*Ts], **values: Any) -> Sequence[Row[*Ts]]:
        """The rows of one query with these parameters; raises :class:`DatabaseAway`.

        A single statement sees one consistent state, so it needs no transaction.
        """
        with _away():
            return await self._readers.call(self._readers.rows, query, values)

    async def read(self, function: Callable[[Session], T]) -> T:
        """Call a function with a read-only session that sees one consistent state.

        Rows may be large. They are fetched, decoded and made into records in a thread.

        Raises
        ------
        DatabaseAway
            The database does not answer.
        """
        with _away():
            return await self._readers.call(self._readers.read, function)

    async def now(self, session: AsyncSession) -> datetime:
        """The current time by the database's clock, the only one that several services can compare."""
        return (await session.execute(select(self.clock))).scalar_one()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A session that commits when its block ends, and rolls back when it raises.

        Raises
        ------
        DatabaseAway
            The database does not answer.
        """
        try:
            with _away():
                async with AsyncSession(self._engine, expire_on_commit=False) as session, session.begin():
                    await session.connection(execution_options={"zbv_writes": True})
                    yield session
        except DatabaseAway as error:
            self._failed_write = DatabaseAway(f"Writing fails: {error}")
            raise
        self._failed_write = None


class BaseTable:
    """Base of the classes that read and write one kind of rows."""

    def __init__(self, database: Database):
        self._database = database


class _Readers:
    """Threads that run queries and decode their rows, which takes long for many or large rows.

    For small rows it is faster, too: the asynchronous driver of SQLite needs a hop to a thread per step.
    """

    def __init__(self, url: URL):
        self._is_sqlite = url.get_backend_name() == "sqlite"
        if self._is_sqlite:
            url = url.set(drivername="sqlite")
            self._engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})
            _begin_explicitly(self._engine, writes=False)
        else:
            self._engine = create_engine(url, **_postgres_options())
        count = FILE_READERS if self._is_sqlite else POOLED
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="zbv-readers")
        self._free = asyncio.Semaphore(count)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a method in a thread; raises :class:`NoConnectionFree` if no thread of a server comes free."""
        try:
            async with asyncio.timeout(None if self._is_sqlite else WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise NoConnectionFree from None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        finally:
            self._free.release()

    def rows(self, query: Select[*Ts], values: dict[str, Any]) -> Sequence[Row[*Ts]]:
        """The rows of a query."""
        with self._engine.connect() as connection:
            if not self._is_sqlite:
                connection.execution_options(isolation_level="AUTOCOMMIT")
            return connection.execute(query, values).all()

    def read(self, function: Callable[[Session], T]) -> T:
        """The result of a function of a session."""
        with Session(self._engine, expire_on_commit=False) as session:
            if not self._is_sqlite:
                session.connection(execution_options=_ONE_STATE)
            return function(session)

    def close(self) -> None:
        """Close every connection."""
        self._threads.shutdown()
        self._engine.dispose()


_LOST_STATES = {"25006", "25P03", "25P04"}
"""Of PostgreSQL: the server became a read-only replica; this process paused for too long in a transaction."""


@contextmanager
def _away() -> Iterator[None]:
    """Translate every driver error that means "the database is away" into :class:`DatabaseAway`."""
    try:
        yield
    except (OperationalError, InterfaceError, InternalError) as error:
        if isinstance(error, InternalError) and getattr(error.orig, "sqlstate", None) not in _LOST_STATES:
            raise  # a bug of this service
        raise DatabaseAway(f"The database does not answer: {error.orig}.") from error
    except NoConnectionFree as error:
        raise DatabaseAway(f"No connection to the database came free within {WAIT_SECONDS:g} s.") from error


def _postgres_options() -> dict[str, Any]:
    limit = round(1000 * STATEMENT_SECONDS)
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    return {
        "pool_size": POOLED,
        "max_overflow": MORE_POOLED,
        "pool_timeout": WAIT_SECONDS,
        # A restarted server leaves dead connections in the pool; this finds them before they are used.
        "pool_pre_ping": True,
        "connect_args": {
            "connect_timeout": round(WAIT_SECONDS),
            "application_name": "zbv-service",
            "options": " ".join(f"-c {name}={limit}" for name in names),
            # If the server's machine disappears, no packet says so; keepalives notice within half a minute.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 4,
        },
    }


def _begin_explicitly(engine: Engine, *, writes: bool) -> None:
    """Make each transaction of a SQLite engine see one state.

    The driver begins a transaction only before the first write, and as a reader that may fail to become
    a writer. So its transactions are switched off, and ``begin`` starts the right kind.
    """

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        if writes:
            cursor = connection.cursor()
            _write_ahead(cursor)
            for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("zbv_migrates", False):
            # SQLite alters a table by copying it and dropping the original, which foreign keys forbid.
            # They can be switched off only outside a transaction.
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("zbv_writes", False) else "BEGIN")


def _write_ahead(cursor: Any) -> None:
    """Switch a new database to write-ahead logging, which is persistent.

    Unlike writes, this switch ignores the busy timeout: if several connections open a new database at once,
    SQLite answers "locked" immediately. So this function retries.
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
