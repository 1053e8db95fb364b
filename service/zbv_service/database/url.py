"""Database URLs: turns the short form that people write into one with an asynchronous driver."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

_DRIVERS = {
    "sqlite": ("sqlite+aiosqlite", "aiosqlite", "service"),
    "postgresql": ("postgresql+psycopg", "psycopg", "postgres"),
}
"""For each kind of database: the driver, its module, and the extra of zbv that installs it."""


def async_url(text: str) -> URL:
    """A database URL with its asynchronous driver filled in.

    Raises
    ------
    ValueError
        The text is not a database URL, names an unsupported database, or the driver is not installed.
    """
    try:
        url = make_url(text)
    except ArgumentError:
        raise ValueError(
            f"found {text!r}; must be a database URL such as sqlite:///zbv.db or "
            f"postgresql://user@host/name. A path alone needs sqlite:/// before it."
        ) from None
    backend = url.get_backend_name()
    if backend not in _DRIVERS:
        raise ValueError(f"found {backend!r}; must be a URL of {' or '.join(_DRIVERS)}.")
    drivername, module, extra = _DRIVERS[backend]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"found {backend!r}; its driver is not installed. Run: pip install 'zbv[{extra}]'.")
    if backend == "sqlite" and sqlite_file(text) is None:
        raise ValueError(
            f"found {text!r}; must name a file, because a database in memory ends with its process."
        )
    return url.set(drivername=drivername)


def shown_url(text: str) -> str:
    """A database URL without its password, for display."""
    return make_url(text).render_as_string(hide_password=True)


def sqlite_file(text: str) -> Path | None:
    """The file of a SQLite database; None for other databases."""
    url = make_url(text)
    name = url.database or ":memory:"
    return Path(name) if url.get_backend_name() == "sqlite" and name != ":memory:" else None
