"""The service under test: the real application in this process over ASGI."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from zbv_service.app import create_app
from zbv_service.settings import Settings
from zbv_service.task import SearchFunction

FAKES = str(Path(__file__).parent / "fakes")
if FAKES not in sys.path:
    sys.path.append(FAKES)  # spawned search processes get this path too

DEADLINE = 60.0
"""Generous: no test is about speed."""

PROBLEM: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 4,
    "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1},
    "memory": {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": 8},
}


@dataclass
class Service:
    """A running application and a client of it."""

    app: FastAPI
    http: httpx.AsyncClient

    async def submit(self, problem: Any = PROBLEM, **options: Any) -> httpx.Response:
        """POST a search."""
        return await self.http.post("/v1/searches", json={"problem": problem, "options": options})

    async def search(self, search_id: str) -> dict[str, Any]:
        """GET a search."""
        answer = await self.http.get(f"/v1/searches/{search_id}")
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def until(self, search_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Look at a search until something holds of it."""
        until = time.monotonic() + DEADLINE
        while not holds(found := await self.search(search_id)):
            assert time.monotonic() < until, f"did not happen in time: {found}"
            await asyncio.sleep(0.02)
        return found

    async def ended(self, search_id: str) -> dict[str, Any]:
        """Wait for a search to end."""
        return await self.until(search_id, lambda found: found["state"] not in ("queued", "running"))


Serving = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where controllable searches and their test leave each other files."""
    monkeypatch.setenv("ZBV_TEST_DIRECTORY", str(tmp_path))
    return tmp_path


def fake(name: str) -> SearchFunction:
    """A search under the test's control (``fakes/zbv_fake_searches.py``)."""
    found: SearchFunction = getattr(importlib.import_module("zbv_fake_searches"), name)
    return found


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
    """Starts applications on the test's database: ``async with serving("held") as service``."""

    @asynccontextmanager
    async def start(search: str | None = None, **changes: Any) -> AsyncIterator[Service]:
        changed = settings.model_copy(update=changes)
        app = create_app(changed) if search is None else create_app(changed, search=fake(search))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://zbv", timeout=DEADLINE) as http,
        ):
            yield Service(app, http)

    return start
