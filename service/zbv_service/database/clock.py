"""The database's clock: the one that all services on a database share."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from zbv_service.database.models import UtcDateTime


class database_now(FunctionElement[datetime]):
    """The moment at which the database evaluates it, also within a transaction that began earlier."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_now, "postgresql")
def _on_postgresql(element: database_now, compiler: SQLCompiler, **_: Any) -> str:
    return "clock_timestamp()"


@compiles(database_now, "sqlite")
def _on_sqlite(element: database_now, compiler: SQLCompiler, **_: Any) -> str:
    # Digits as the type stores them: SQLite knows milliseconds only.
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"
