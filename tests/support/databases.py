"""The databases that tests run on: SQLite, and PostgreSQL where ``ZBV_TEST_POSTGRES`` is a server's URL."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, make_url, text

SERVER = os.environ.get("ZBV_TEST_POSTGRES", "")
"""Such as ``postgresql://postgres@127.0.0.1/postgres``; its user may create databases."""
KINDS: tuple[str, ...] = ("sqlite", "postgresql") if SERVER else ("sqlite",)


@contextmanager
def an_empty_database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a database of its own, gone afterwards."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/zbv.db"
        return
    name = f"zbv_test_{secrets.token_hex(8)}"
    server = make_url(SERVER)
    engine = create_engine(server.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        yield server.set(database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        engine.dispose()
