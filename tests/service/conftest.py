"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import fake_searches
from support.databases import KINDS, an_empty_database
from support.serving import DEADLINE, Service, Serving
from zbv_service.app import create_app
from zbv_service.settings import Settings


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where controllable searches and their test leave each other files."""
    monkeypatch.setenv("ZBV_TEST_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database, of every kind in turn."""
    with an_empty_database(request.param, tmp_path) as url:
        yield url


@pytest.fixture
def settings(directory: Path, database_url: str) -> Settings:
    return Settings(
        database=database_url,
        searches=2,
        heartbeat_seconds=0.2,
        max_body_bytes=100_000,
        max_plan_bytes=200_000,
        max_cells=10_000,
    )


@pytest.fixture
def serving(settings: Settings) -> Serving:
    """Starts applications on the test's database."""

    @asynccontextmanager
    async def start(search: str, **changes: Any) -> AsyncIterator[Service]:
        app = create_app(settings.model_copy(update=changes), search=fake_searches.BY_NAME[search])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://zbv", timeout=DEADLINE) as http,
        ):
            yield Service(app, http)

    return start
