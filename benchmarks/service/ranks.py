"""Rate and latency of fetching rank plans, alone and while a search uses the cores."""

from __future__ import annotations

import asyncio
import time

from zbv_service.client import Client

from benchmarks.findings import Finding, at_least, at_most, quantile
from benchmarks.service.load import Load, get, offer, saturate
from benchmarks.service.served import serving
from benchmarks.service.workload import LONG, plan_to_serve

RATE_TARGET = 2000.0
ALONE_TARGET, BESIDE_TARGET = 20.0, 50.0
"""Targets for the 99th percentile in milliseconds: alone, and while a search runs."""
SEARCH_DEADLINE = 60.0


def measure(seconds: float, connections: int, offered: float) -> list[Finding]:
    """Start a service, store a plan, and fetch its ranks.

    Parameters
    ----------
    seconds
        Duration of each measurement.
    offered
        Fetches per second while a search runs.
    """
    with serving("--searches", "1") as served, Client(served.address) as client:
        document = plan_to_serve()
        plan_id, ranks = client.import_plan(document), document["problem"]["pp_degree"]
        paths = [f"/v1/plans/{plan_id}/ranks/{rank}" for rank in range(ranks)]
        requests = [get(served.address, path, served.token) for path in paths]
        asyncio.run(saturate(served.address, requests, connections, min(1.0, seconds)))  # caches and pools
        cpu = served.cpu_seconds
        alone = asyncio.run(saturate(served.address, requests, connections, seconds))
        cpu = served.cpu_seconds - cpu
        search_id = _begin_search(client)
        beside = asyncio.run(offer(served.address, requests, connections, seconds, offered))
        is_running = client.search(search_id).state == "running"
        client.cancel(search_id)
    return [
        Finding(f"rank plans, {connections} connections", alone.rate, "/s", at_least(RATE_TARGET)),
        Finding("  CPU time of the service per fetch", 1e6 * cpu / len(alone.latencies), "µs"),
        Finding("  median", 1e3 * quantile(alone.latencies, 0.5), "ms"),
        Finding("  99th percentile", 1e3 * quantile(alone.latencies, 0.99), "ms", at_most(ALONE_TARGET)),
        Finding(f"while a search runs, {offered:g}/s offered", beside.rate, "/s", at_least(0.98 * offered)),
        Finding("  median", 1e3 * quantile(beside.latencies, 0.5), "ms"),
        Finding("  99th percentile", 1e3 * quantile(beside.latencies, 0.99), "ms", at_most(BESIDE_TARGET)),
        Finding("  the search was still running", float(is_running), "", at_least(1)),
        Finding("responses other than 200", _others(alone) + _others(beside), "", at_most(0)),
    ]


def _begin_search(client: Client) -> str:
    search_id = client.submit(LONG, {"effort": "thorough", "time_limit": 3600}).id
    until = time.monotonic() + SEARCH_DEADLINE
    while client.search(search_id).objective is None:
        if time.monotonic() > until:
            raise TimeoutError("the search did not start; the benchmark needs a running search.")
        time.sleep(0.1)
    return search_id


def _others(load: Load) -> int:
    return sum(count for status, count in load.statuses.items() if status != 200)
