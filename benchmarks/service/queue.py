"""A long queue: every accepted search survives if the service is killed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from zbv_service.client import AsyncClient, Client

from benchmarks.findings import Finding, at_least, at_most
from benchmarks.service.served import serving
from benchmarks.service.workload import LONG, SMALL

AT_ONCE = 16


def measure(count: int) -> list[Finding]:
    """Submit this number of searches, kill the service with SIGKILL, restart it, and count."""
    with serving("--searches", "1") as served:
        with Client(served.address) as client:
            running = client.submit(LONG, {"effort": "thorough", "time_limit": 3600}).id
        began = time.perf_counter()
        accepted = asyncio.run(_submit(served.address, count))
        seconds = time.perf_counter() - began
        served.kill()
        served.start()
        with Client(served.address) as client:
            kept = {search.id: search.state for search in client.all_searches(1000)}
            client.cancel(running)
    lost = [search_id for search_id in accepted if search_id not in kept]
    unfit = [search_id for search_id in accepted if kept.get(search_id) in ("failed", "cancelled")]
    return [
        Finding("searches accepted", len(set(accepted)), "", at_least(count)),
        Finding("  per second", count / seconds, "/s"),
        Finding("lost over SIGKILL and restart", len(lost), "", at_most(0)),
        Finding("failed or cancelled", len(unfit), "", at_most(0)),
        Finding("the running search survived", float(running in kept), "", at_least(1)),
    ]


async def _submit(address: str, count: int) -> list[str]:
    turns = asyncio.Semaphore(AT_ONCE)

    async with AsyncClient(address) as client:

        async def one(number: int) -> str:
            problem: dict[str, Any] = {**SMALL, "costs": {**SMALL["costs"], "forward": 1000 + number}}
            async with turns:
                return (await client.submit(problem, {"effort": "quick"})).id

        return await asyncio.gather(*map(one, range(count)))
