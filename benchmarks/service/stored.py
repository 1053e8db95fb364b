"""A known problem: the time until the answer from the database."""

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
    """Search once; then send the same request repeatedly."""
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
        Finding("first request, including the search", 1e3 * first, "ms"),
        Finding("repeated request: median", quantile(milliseconds, 0.5), "ms", at_most(TARGET)),
        Finding("  99th percentile", quantile(milliseconds, 0.99), "ms", at_most(TARGET)),
        Finding(
            "responses other than 200", sum(n for s, n in load.statuses.items() if s != 200), "", at_most(0)
        ),
        Finding("the search is the same", float(again.id == search.id), "", at_least(1)),
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
