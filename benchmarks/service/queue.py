"""A long queue of one token: another token hardly waits, and a killed service loses nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zbv_service.client import Client

from benchmarks.findings import Finding, at_least, at_most
from benchmarks.service.served import LONG, MANY_LAYOUTS, SMALL, serving

AT_ONCE = 16
START_SECONDS = 5.0
"""Target for the start of another token's search."""


def measure(count: int) -> list[Finding]:
    """Submit this number of searches of one token, in addition to a long one and two searches of layouts.

    Measure how long searches of another token wait. Then kill the service, restart it, and count.
    """
    with serving("--searches", "1") as served:
        with Client(served.address) as client:
            running = client.submit(LONG, {"effort": "thorough", "time_limit": 3600}).id
            for reserve in range(2):
                cluster = {**MANY_LAYOUTS["cluster"], "reserve": reserve}
                client.submit_layouts({**MANY_LAYOUTS, "cluster": cluster})
        accepted = _submit(served.address, count)
        token = served.new_token("search", "read")
        waits = [_wait(served.address, token, number) for number in range(3)]
        served.kill()
        served.start()
        with Client(served.address) as client:
            kept = {search.id: search.state for search in client.all_searches(1000)}
            client.cancel(running)
    lost = [search_id for search_id in accepted if search_id not in kept]
    unfit = [search_id for search_id in accepted if kept.get(search_id) in ("failed", "cancelled")]
    return [
        Finding("searches accepted", len(set(accepted)), "", at_least(count)),
        Finding("a small search of another token starts after", max(waits), "s", at_most(START_SECONDS)),
        Finding("lost over SIGKILL and restart", len(lost), "", at_most(0)),
        Finding("failed or cancelled", len(unfit), "", at_most(0)),
        Finding("the running search survived", float(running in kept), "", at_least(1)),
    ]


def _wait(address: str, token: str, number: int) -> float:
    """Seconds until a new search of a token starts; then its end is awaited."""
    with Client(address, token=token) as client:
        began = time.perf_counter()
        problem: dict[str, Any] = {**SMALL, "costs": {**SMALL["costs"], "forward": 2000 + number}}
        search_id = client.submit(problem, {"effort": "quick"}).id
        while client.search(search_id).state == "queued":
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        client.wait(search_id)
        return seconds


def _submit(address: str, count: int) -> list[str]:
    with Client(address) as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def one(number: int) -> str:
            problem: dict[str, Any] = {**SMALL, "costs": {**SMALL["costs"], "forward": 1000 + number}}
            return client.submit(problem, {"effort": "quick"}).id

        return list(threads.map(one, range(count)))
