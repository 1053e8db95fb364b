"""A service that is killed while it accepts searches loses none of them and stores none twice.

``python -m benchmarks service queue`` does the same with thousands of searches.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.event_streams import events_of
from support.fake_service import FakeService, fake_service
from support.serving import DEADLINE, PROBLEM, until

SEARCHES = 48
STREAMS = 40
CONNECTIONS = 8


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow as many open sockets as the test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 3 * STREAMS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def submit(address: str, seeds: Iterable[int], accepted: dict[int, str]) -> None:
    """Submit searches over a few connections, and record the accepted ones; end when nobody answers."""
    waiting = iter(seeds)

    async def work(http: httpx.AsyncClient) -> None:
        for seed in waiting:
            body = {"problem": PROBLEM, "options": {"seed": seed}}
            try:
                answer = await http.post("/v1/searches", json=body)
            except httpx.TransportError:
                return
            assert answer.status_code == 202, answer.text
            accepted[seed] = answer.json()["id"]

    async with httpx.AsyncClient(base_url=address, timeout=DEADLINE) as http:
        await asyncio.gather(*(work(http) for _ in range(CONNECTIONS)))


async def states_of(address: str) -> dict[str, str]:
    """The state of every listed search, read page by page."""
    found: dict[str, str] = {}
    following: str | None = "/v1/searches?limit=300"
    async with httpx.AsyncClient(base_url=address, timeout=DEADLINE) as http:
        while following is not None:
            page = (await http.get(following)).json()
            assert not found.keys() & {entry["id"] for entry in page["searches"]}
            found |= {entry["id"]: entry["state"] for entry in page["searches"]}
            following = page["next"]
    return found


async def test_none_of_many_searches_is_lost_when_the_service_is_killed(
    directory: Path, many_files: None
) -> None:
    accepted: dict[int, str] = {}
    with fake_service("held", directory) as first:
        submitting = asyncio.create_task(submit(first.address, range(SEARCHES), accepted))
        await until(lambda: len(accepted) >= SEARCHES // 2, "half of the searches")
        first.process.kill()
        first.process.wait(DEADLINE)
        await submitting
    before = dict(accepted)
    assert SEARCHES // 2 <= len(before) < SEARCHES
    with fake_service("held", directory) as second:
        # Nobody knows whether the service handled the interrupted requests. Their keys make repetition safe.
        await submit(second.address, sorted(set(range(SEARCHES)) - before.keys()), accepted)
        assert before.items() <= accepted.items()
        states = await states_of(second.address)
        assert sorted(states) == sorted(accepted.values())
        assert len(states) == SEARCHES
        assert set(states.values()) <= {"queued", "running"}
        await hold_streams(second, list(accepted.values())[::-1][:STREAMS])


async def hold_streams(service: FakeService, search_ids: list[str]) -> None:
    """One reader per search; meanwhile the service answers requests and streams the end of a search."""
    host, port = str(urlsplit(service.address).hostname), int(str(urlsplit(service.address).port))
    streams = await asyncio.gather(*(asyncio.open_connection(host, port) for _ in search_ids))
    async with asyncio.timeout(DEADLINE):
        for search_id, (_, writer) in zip(search_ids, streams, strict=True):
            head = f"GET /v1/searches/{search_id}/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
            writer.write(head.encode())
        for reader, _ in streams:
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert b"submitted" in await reader.readuntil(b"id: 1\n\n")
        async with httpx.AsyncClient(base_url=service.address, timeout=DEADLINE) as http:
            cancelled = await http.post(f"/v1/searches/{search_ids[0]}/cancel")
            assert cancelled.json()["state"] == "cancelled"
        rest = await streams[0][0].readuntil(b"\r\n0\r\n\r\n")
        lines = [line for line in rest.decode().split("\r\n") if ":" in line]
        assert events_of("".join(lines))[-1].data["state"] == "cancelled"
    for _, writer in streams:
        writer.close()
