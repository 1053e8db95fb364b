"""Opens files of SQLite privately, and runs the packaged Alembic migrations on an open connection."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

BUSY_SECONDS = 30.0
"""How long a SQLite writer waits for another writer before it gives up."""
_MIGRATIONS = Path(__file__).parent / "migrations"

logger = logging.getLogger(__name__)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade to a revision inside the connection's transaction."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def open_once(path: str) -> None:
    """Create a new file with private permissions, or raise the error of opening it.

    The asynchronous driver would raise the same error, but its thread then outlives the event loop and
    writes a traceback to standard error.
    """
    with suppress(OSError):  # sqlite3 reports the reason
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    sqlite3.connect(path, timeout=BUSY_SECONDS).close()


def make_private(path: Path) -> None:
    """Make a database file and its ``-wal`` and ``-shm`` files private to this user.

    New files are private from the start, because SQLite copies the permissions of the main file. A file that
    somebody copied here, such as a backup, may not be.
    """
    for suffix in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(path.name + suffix)
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o077:
                file.chmod(0o600)
                logger.warning("%s had mode %o, so other users could read it; changed to 600.", file, mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning(
                "other users of this machine can use %s, and its mode cannot be changed (%s). It holds all "
                "problems and plans: have its owner run chmod 600.",
                file,
                error.strerror,
            )
