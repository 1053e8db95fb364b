"""The databases that tests run on: SQLite, and a PostgreSQL server that the tests start.

``ZBV_TEST_POSTGRES`` may name another server, for example ``postgresql://postgres@127.0.0.1/postgres``. Its
user must be allowed to create databases.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import IntegrityError, ProgrammingError
from zbv_service import database
from zbv_service.database.engine import Base
from zbv_service.database.migrate import upgrade
from zbv_service.settings import async_url

Kind = Literal["sqlite", "postgresql"]
KINDS: tuple[Kind, ...] = ("sqlite", "postgresql")

TABLES = Path(database.__file__).parent


def migrate(url: str) -> None:
    parsed = async_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    engine = create_engine(parsed.set(drivername="sqlite") if is_sqlite else parsed)
    with engine.connect() as connection, connection.begin():
        upgrade(connection)
    engine.dispose()


class SqliteDatabases:
    """Databases in files. Databases with tables are copies of one that was migrated once."""

    def __init__(self, folder: Path):
        self._template = folder / "migrated.db"
        migrate(f"sqlite:///{self._template}")

    def migrated(self, folder: Path) -> str:
        """The URL of a database with all tables, in a folder."""
        shutil.copyfile(self._template, folder / "zbv.db")
        return f"sqlite:///{folder}/zbv.db"


class PostgresDatabases:
    """Databases of one server. Databases with tables are copies of one that was migrated once."""

    def __init__(self, server: str):
        self._server = make_url(server)

    @contextmanager
    def empty(self) -> Iterator[str]:
        """The URL of a new database, which is dropped afterwards."""
        with self._a_database("template0") as url:
            yield url

    @contextmanager
    def migrated(self) -> Iterator[str]:
        """As :meth:`empty`, with all tables."""
        with self._a_database(self._template()) as url:
            yield url

    @staticmethod
    def clear(url: str) -> None:
        """Remove every row from the tables of a database, which is faster than a new database."""
        engine = create_engine(async_url(url), poolclass=NullPool)
        with engine.connect() as connection, connection.begin():
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(table.delete())

    def _url(self, name: str) -> str:
        return self._server.set(database=name).render_as_string(hide_password=False)

    def _engine(self) -> Engine:
        server = self._server.set(drivername="postgresql+psycopg")
        return create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool)

    @contextmanager
    def _a_database(self, template: str) -> Iterator[str]:
        name = f"zbv_test_{secrets.token_hex(8)}"
        engine = self._engine()
        try:
            with engine.connect() as connection:
                connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
            yield self._url(name)
            with engine.connect() as connection:
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        finally:
            engine.dispose()

    def _template(self) -> str:
        """The migrated database that others are copied from; the first process that needs it creates it."""
        files = (TABLES / "models.py", *sorted((TABLES / "migrations/versions").glob("v*.py")))
        sources = b"".join(path.read_bytes() for path in files)
        name = f"zbv_template_{hashlib.sha256(sources).hexdigest()[:16]}"
        engine = self._engine()
        try:
            with engine.connect() as connection:
                known = text(f"SELECT 1 FROM pg_database WHERE datname = '{name}'")
                if connection.scalar(known) is None:
                    unfinished = f"zbv_test_{secrets.token_hex(8)}"
                    connection.execute(text(f"CREATE DATABASE {unfinished} TEMPLATE template0"))
                    migrate(self._url(unfinished))
                    try:
                        connection.execute(text(f"ALTER DATABASE {unfinished} RENAME TO {name}"))
                    except (ProgrammingError, IntegrityError):  # another process was faster
                        connection.execute(text(f"DROP DATABASE {unfinished}"))
        finally:
            engine.dispose()
        return name
