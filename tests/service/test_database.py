"""Database URLs, and what is SQLite's own. What every database must do is in contract/."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from zbv_service.database import Database
from zbv_service.database.url import async_url


@pytest.mark.anyio
async def test_sqlite_writes_ahead_waits_for_others_and_checks_references(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/zbv.db")
    await database.migrate()
    for _ in range(2):  # the connection of the migration is not among those that others get
        async with database.reading() as session:
            found = [
                (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
                for name in ("journal_mode", "busy_timeout", "foreign_keys")
            ]
        assert found == ["wal", 30_000, 1]
    await database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [("zbv.db", "sqlite:///"), ("mysql://h/d", "mysql"), ("", "database URL"), ("sqlite//x", "database URL")],
)
def test_a_wrong_url_is_refused_with_the_remedy(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        async_url(url)


@pytest.mark.parametrize("url", ["sqlite:///x.db", "sqlite+aiosqlite:///x.db"])
def test_the_driver_is_filled_in(url: str) -> None:
    assert str(async_url(url)) == "sqlite+aiosqlite:///x.db"
