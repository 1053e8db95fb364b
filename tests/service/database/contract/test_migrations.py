"""Migrations of an empty database, by one service or several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, text
from zbv_service.database import Database, DatabaseUnusable, SearchTable
from zbv_service.database.migrate import upgrade
from zbv_service.database.models import Base
from zbv_service.database.url import async_url
from zbv_service.records.lists import SearchListQuery


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Engine]:
    url = async_url(empty_database_url)
    is_sqlite = url.get_backend_name() == "sqlite"
    opened = create_engine(url.set(drivername="sqlite" if is_sqlite else url.drivername))
    yield opened
    opened.dispose()


def test_migrations_build_the_tables_that_the_code_uses(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin():
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, Base.metadata)
    assert differences == []


async def test_migrating_twice_or_at_once_changes_nothing_and_a_newer_version_is_refused(
    empty_database_url: str,
) -> None:
    opened = [Database(empty_database_url) for _ in range(4)]
    await asyncio.gather(*(each.migrate() for each in opened))
    await opened[0].migrate()
    assert (await SearchTable(opened[1]).page(SearchListQuery(limit=1))).items == ()
    async with opened[2].writing() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match="9999"):
        await opened[3].migrate()
    for each in opened:
        await each.close()
