"""Event streams: many are open at once while nothing happens, and each receives the end of the search."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from zbv_service.client import Client

from benchmarks.findings import Finding, at_least, at_most, quantile
from benchmarks.service.served import Served, serving
from benchmarks.service.workload import LONG, SMALL

OPEN_SECONDS = 60.0
END_SECONDS = 60.0
OPENED_AT_ONCE = 50
MEBIBYTE = 1024 * 1024


def measure(count: int, seconds: float) -> list[Finding]:
    """Open this number of streams of a queued search, wait, then end the search."""
    with serving("--searches", "1") as served, Client(served.address) as client:
        # Another search runs, so the followed search stays in the queue.
        blocking = client.submit(LONG, {"effort": "thorough", "time_limit": 3600}).id
        followed = client.submit(SMALL).id
        found = asyncio.run(_hold(served, client, followed, count, seconds))
        client.cancel(blocking)
    return found


async def _hold(served: Served, client: Client, search_id: str, count: int, seconds: float) -> list[Finding]:
    before = served.memory
    turns = asyncio.Semaphore(OPENED_AT_ONCE)
    opened = await asyncio.gather(*(_open(served, search_id, turns) for _ in range(count)))
    streams = [stream for stream in opened if stream is not None]
    memory, cpu = served.memory - before, served.cpu_seconds
    watched = [asyncio.create_task(_until_end(reader)) for reader, _ in streams]
    await asyncio.sleep(seconds)
    cpu = served.cpu_seconds - cpu
    dropped = sum(task.done() for task in watched)
    told = time.perf_counter()
    await asyncio.to_thread(client.cancel, search_id)
    ends = await asyncio.gather(*watched)
    delays = [at - told for at in ends if at is not None]
    for _, writer in streams:
        writer.close()
    return [
        Finding("event streams opened", len(streams), "", at_least(count)),
        Finding(f"  broken within {seconds:g} s", dropped, "", at_most(0)),
        Finding("  memory of the service per stream", memory / max(1, len(streams)) / 1024, "KiB"),
        Finding("  memory for all streams", memory / MEBIBYTE, "MiB"),
        Finding("  CPU of the service meanwhile", 100 * cpu / seconds, "%"),
        Finding("received the end", len(delays), "", at_least(count)),
        Finding("  latest after", 1e3 * max(delays, default=0.0), "ms"),
        Finding("  median", 1e3 * quantile(delays or [0.0], 0.5), "ms"),
    ]


async def _open(
    served: Served, search_id: str, turns: asyncio.Semaphore
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    parts = urlsplit(served.address)
    authorization = f"Authorization: Bearer {served.token}\r\n" if served.token else ""
    request = (
        f"GET /v1/searches/{search_id}/events HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Accept: text/event-stream\r\n{authorization}\r\n"
    )
    async with turns, asyncio.timeout(OPEN_SECONDS):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(request.encode())
        head = await reader.readuntil(b"\r\n\r\n")
    return (reader, writer) if head.startswith(b"HTTP/1.1 200") else None


async def _until_end(reader: asyncio.StreamReader) -> float | None:
    """Time when the event ``end`` arrived; None if the stream ended without it."""
    try:
        while line := await asyncio.wait_for(reader.readline(), END_SECONDS * 10):
            if line.strip() == b"event: end":
                return time.perf_counter()
    except (OSError, TimeoutError):
        return None
    return None
