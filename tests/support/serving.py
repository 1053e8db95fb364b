"""The real application in this process, over ASGI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

DEADLINE = 120.0
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
        """Poll a search until a condition holds."""
        until = time.monotonic() + DEADLINE
        while not holds(found := await self.search(search_id)):
            assert time.monotonic() < until, f"did not happen in time: {found}"
            await asyncio.sleep(0.02)
        return found

    async def ended(self, search_id: str) -> dict[str, Any]:
        """Wait for a search to end."""
        return await self.until(search_id, lambda found: found["state"] not in ("queued", "running"))


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition in this process."""
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


Serving = Callable[..., AbstractAsyncContextManager[Service]]
"""``async with serving("held", searches=1) as service``: a fake search's name, and changed settings."""
