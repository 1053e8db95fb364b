"""Database URLs: the short form that people write, and the asynchronous driver behind it."""

from __future__ import annotations

import importlib.util

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

_DRIVERS = {"sqlite": ("sqlite+aiosqlite", "aiosqlite"), "postgresql": ("postgresql+psycopg", "psycopg")}


def async_url(text: str) -> URL:
    """A database URL with its asynchronous driver filled in.

    Raises
    ------
    ValueError
        When the text is no database URL, names another kind of database, or its driver is not installed.
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
    drivername, module = _DRIVERS[backend]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"found {backend!r}; its driver {module} is not installed. Install {module}.")
    return url.set(drivername=drivername)
