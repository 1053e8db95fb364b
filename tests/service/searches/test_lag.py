"""A service that is stopped for a while does not lose agents that kept sending heartbeats."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator

import httpx
import pytest
from support import fake_searches
from support.fake_kinds import kinds
from support.live import Live, listening
from zbv_service.app import create_app
from zbv_service.settings import Settings

TIMEOUT = 0.6


@pytest.fixture
def live(database_url: str) -> Iterator[Live]:
    settings = Settings(
        auth="none",
        database=database_url,
        searches=1,
        agent_heartbeat_seconds=0.1,
        agent_timeout_seconds=TIMEOUT,
    )
    with listening(create_app(settings, kinds=kinds(fake_searches.immediate))) as found:
        yield found


def test_a_service_that_was_stopped_reads_heartbeats_before_it_declares_agents_lost(live: Live) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    ended = threading.Event()

    @live.app.get("/loop")
    async def loop_of() -> None:
        loops.append(asyncio.get_running_loop())

    names = [uuid.uuid4().hex for _ in range(4)]
    statuses: list[int] = []
    with httpx.Client(base_url=live.address, timeout=30) as http:
        for name in names:
            body = {"id": name, "name": name, "address": "h", "port": 1, "slots": 1}
            assert http.post("/v1/agents", json=body).status_code == 201
        http.get("/loop")

        def beat() -> None:
            with httpx.Client(base_url=live.address, timeout=30) as mine:
                while not ended.wait(0.1):
                    for name in names:
                        statuses.append(mine.post(f"/v1/agents/{name}/heartbeat", json={}).status_code)

        beating = threading.Thread(target=beat)
        beating.start()
        loops[0].call_soon_threadsafe(time.sleep, 2.5 * TIMEOUT)
        time.sleep(3.2 * TIMEOUT)
        ended.set()
        beating.join()
        present = {agent["id"] for agent in http.get("/v1/agents").json()["agents"]}
    assert set(statuses) == {200}
    assert present == set(names)
