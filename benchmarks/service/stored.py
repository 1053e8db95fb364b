"""A problem that was answered before: how soon its answer comes from the store."""

from __future__ import annotations

import asyncio
import json
import time
from urllib.parse import urlsplit

from zbv_service.client import Client

from benchmarks.findings import Finding, at_least, at_most, quantile
from benchmarks.service.load import saturate
from benchmarks.service.served import Served, serving
from benchmarks.service.workload import SMALL

TARGET = 5.0
WAIT_SECONDS = 120.0


def measure(seconds: float) -> list[Finding]:
    """Search once; then ask the same, one request after the other."""
    options = {"effort": "quick", "time_limit": None, "seed": 0}
    with serving("--searches", "1") as served:
        with Client(served.address) as client:
            began = time.perf_counter()
            search = client.wait(client.submit(SMALL, options).id, timeout=WAIT_SECONDS)
            first = time.perf_counter() - began
            again = client.submit(SMALL, options)
        request = _post(served, {"problem": SMALL, "options": options})
        load = asyncio.run(saturate(served.address, [request], 1, seconds))
    milliseconds = [1e3 * latency for latency in load.latencies]
    return [
        Finding("the first time, the search included", 1e3 * first, "ms"),
        Finding("the same again: median", quantile(milliseconds, 0.5), "ms", at_most(TARGET)),
        Finding("  99 of 100 within", quantile(milliseconds, 0.99), "ms", at_most(TARGET)),
        Finding(
            "answers other than 200", sum(n for s, n in load.statuses.items() if s != 200), "", at_most(0)
        ),
        Finding("it is the same search", float(again.id == search.id), "", at_least(1)),
    ]


def _post(served: Served, body: object) -> bytes:
    text = json.dumps(body).encode()
    lines = [
        "POST /v1/searches HTTP/1.1",
        f"Host: {urlsplit(served.address).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        *([f"Authorization: Bearer {served.token}"] if served.token else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text
