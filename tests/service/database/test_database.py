"""Database URLs, and the files of SQLite. Tests of every kind of database are in contract/."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest
from sqlalchemy import text
from zbv_service.database import Database
from zbv_service.database.url import async_url


async def test_sqlite_uses_a_write_ahead_log_a_busy_timeout_and_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/zbv.db")
    await database.migrate()
    for _ in range(2):  # nobody gets the connection of the migration
        async with database.reading() as session:
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


def test_a_url_gets_its_driver_and_a_wrong_one_is_refused_with_a_remedy() -> None:
    for url in ("sqlite:///x.db", "sqlite+aiosqlite:///x.db"):
        assert str(async_url(url)) == "sqlite+aiosqlite:///x.db"
    for url, message in (("zbv.db", "sqlite:///"), ("mysql://h/d", "mysql"), ("", "database URL")):
        with pytest.raises(ValueError, match=message):
            async_url(url)
