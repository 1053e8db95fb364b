"""Fixtures of the service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import fake_searches
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


@pytest.fixture
def settings(directory: Path) -> Settings:
    return Settings(
        database=f"sqlite:///{directory}/zbv.db",
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
