"""Sixteen clients each repeat the most expensive request that we know; measure the response times of others.

Among them are all reads of the largest objects that the service accepts, and requests of a few bytes that
cost much work (``attack``). ``--only "the largest" --only attack --seconds 2`` measures only these.

The clients are a separate process. Meanwhile, this process requests health checks and ranks at a steady rate,
as balancers and agents do. It sends the same requests to an idle server: delays of that server are caused by
other work of the machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from support.largest_objects import LARGEST, Stored, reads, store
from support.worst_bodies import AGENT, COUNTER, ID, RUN, WEIGHTS, Worst, worst
from zbv_service.client import Client
from zbv_solver.export import FORMATS

from benchmarks.findings import Finding, at_most, quantile
from benchmarks.service.load import Load, get, head, offer
from benchmarks.service.served import MANY_LAYOUTS, SMALL, Served, plan_to_serve, serving

CLIENTS = 16
TARGET = 50.0
"""Target for the 99th percentile of response times, in milliseconds."""
MEMORY_TARGET = 1000.0
ALL_MEMORY_TARGET = 2000.0
"""Targets for the memory of the service's process, and of it with its children, in megabytes."""
RATE = 50.0
"""Health checks and rank fetches per second."""
ANSWER_SECONDS = 90.0
LOOK_SECONDS = 0.1
LISTED = 200
STORED = (64, 1024)
"""Ranks and microbatches of the large stored plan."""
NICENESS = 5
"""Niceness of the clients. They stand for other machines and should not take this machine's cores."""


@dataclass
class Memory:
    """Peak memory of the service's process, and of it with all children, in bytes."""

    own: int = 0
    all: int = 0


def measure(seconds: float, only: Sequence[str] = ()) -> list[Finding]:
    """Start a service, and repeat every request for a while.

    Parameters
    ----------
    seconds
        Duration for each request.
    only
        Parts of the names or paths of requests; if empty, all requests.
    """
    found: list[Finding] = []
    with serving("--searches", "1", "--agent-timeout-seconds", "86400") as served, _bystander() as control:
        with Client(served.address, timeout=ANSWER_SECONDS) as client:
            small, large = plan_to_serve(), plan_to_serve(*STORED)
            plan_id, large_id = client.import_plan(small), client.import_plan(large)
            trace_path = _begin_run(served, plan_id)
            for number in range(LISTED):
                client.submit({**SMALL, "memory": {**WEIGHTS, "limit": 0.001 + number}}, {"effort": "quick"})
        ranks = [f"/v1/plans/{plan_id}/ranks/{rank}" for rank in range(small["problem"]["pp_degree"])]
        asking = [get(served.address, path, served.token) for path in ("/healthz", *ranks)]
        asyncio.run(_quiet(served, control, asking, 1.0))  # caches
        alone_loads = asyncio.run(_quiet(served, control, asking, max(seconds, 5.0)))
        alone = _findings("without hostile clients", alone_loads)
        found += alone
        memory, answers = Memory(), Counter[int]()
        requests = [*_attacks(large_id), *worst(trace_path), *_reads(large_id), *_largest(served, only)]
        for request in requests:
            if not _is_wanted(request, only):
                continue
            cpu = served.cpu_seconds
            loads, statuses = asyncio.run(_attacked(served, control, request, asking, seconds, memory))
            share = (served.cpu_seconds - cpu) / seconds
            counts = (f"{count} × {status or 'none'}" for status, count in sorted(statuses.items()))
            found += _findings(
                f"{_title(request)} ({', '.join(counts) or 'no answer yet'}; {share:.0%} of a core)", loads
            )
            answers += statuses
            for each in found[-3:]:  # show progress, because all requests take many minutes
                Console(stderr=True).print(f"{each.value:9.1f} ms  {each.what}", soft_wrap=True)
    late = [each.value for each in found[len(alone) :]] or [0.0] * 3
    return [
        *found,
        Finding("health checks, worst 99th percentile", max(late[::3]), "ms", at_most(TARGET)),
        Finding("rank fetches, worst 99th percentile", max(late[1::3]), "ms", at_most(TARGET)),
        Finding("  idle server, worst", max(late[2::3]), "ms"),
        Finding("peak memory of the service's process", memory.own / 1e6, "MB", at_most(MEMORY_TARGET)),
        Finding("  including its children", memory.all / 1e6, "MB", at_most(ALL_MEMORY_TARGET)),
        Finding("answers 500", float(answers[500]), "", at_most(0)),
    ]


def _attacks(plan_id: str) -> Iterator[Worst]:
    """Requests of few bytes whose work was once unbounded, kept the event loop, or outlived their clients."""
    accept = ", ".join(f"text/x{number};q=0.{number % 9 + 1}" for number in range(1500))
    yield Worst("attack: a long Accept", "GET", "/v1/plans", accept=accept)
    yield Worst("attack: layouts of 5,040 nodes", "POST", "/v1/layouts", _layouts)
    simulation = f"/v1/plans/{plan_id}/simulation?scenarios=100"
    yield Worst("attack: abandoned simulations", "GET", simulation, seconds=0.2)
    yield Worst("attack: abandoned comparisons", "GET", f"/plans/{plan_id}/compare", seconds=0.2)


def _layouts() -> bytes:
    """No two requests have the same ``reserve``, so the service knows no answer."""
    cluster = {**MANY_LAYOUTS["cluster"], "reserve": int(COUNTER)}
    return json.dumps({**MANY_LAYOUTS, "cluster": cluster, "options": {"time_limit": 1}}).encode()


def _reads(plan_id: str) -> Iterator[Worst]:
    """Reads of a large stored plan and of lists."""
    for path in ("searches", "plans", "runs", "agents"):
        yield Worst(f"list of {path}", "GET", f"/v1/{path}?limit=1000")
        yield Worst(f"page of {path}", "GET", f"/{path}?limit=1000")
    for name in (*FORMATS, "unknown"):
        yield Worst(f"export {name}", "GET", f"/v1/plans/{plan_id}/export/{name}")
    for name in ("", "/chart", "/actions", "/thumbnail.png", "/frontier", "/compare", "/compare?with=zb-h1"):
        yield Worst(f"page of a plan{name}", "GET", f"/plans/{plan_id}{name}")
    yield Worst("plan", "GET", f"/v1/plans/{plan_id}")
    yield Worst("plan that is not read", "GET", f"/v1/plans/{plan_id}", reads=False)
    yield Worst("form with a plan", "GET", f"/new?from={plan_id}")
    for path in ("openapi.json", "readyz", "metrics"):
        yield Worst(path, "GET", f"/{path}")


def _largest(served: Served, only: Sequence[str]) -> list[Worst]:
    """All reads of the largest objects, which are stored if some read of them is wanted."""

    def requests(stored: Stored) -> list[Worst]:
        return [Worst("the largest", "GET", read.path, accept=read.accept) for read in reads(stored)]

    if not any(_is_wanted(request, only) for request in requests(Stored(*["…"] * 7))):
        return []
    return requests(asyncio.run(_store(served)))


def _is_wanted(request: Worst, only: Sequence[str]) -> bool:
    return not only or any(part in _title(request) for part in only)


def _title(request: Worst) -> str:
    """The name of a request, with the ids of its address shortened."""
    path = re.sub(r"[0-9a-f]{32,}", "…", request.path)
    return f"{request.method} {path}: {request.name}"


def _begin_run(served: Served, plan_id: str) -> str:
    """Start a run; returns the address for the trace of one of its ranks."""
    with httpx.Client(**_reaching(served)) as http:
        http.post("/v1/agents", json={**AGENT, "slots": 256, "devices": []}).raise_for_status()
        run = {**RUN, "plan_id": plan_id, "nodes": 1, "steps": 1000}
        http.post("/v1/runs", json=run).raise_for_status()
        work = http.get(f"/v1/agents/{ID}/work", params={"wait": 10}).raise_for_status().json()
    return f"/v1/agents/{ID}/runs/{work['run_id']}/generations/{work['generation']}/ranks/0/trace"


async def _store(served: Served) -> Stored:
    """Store the largest objects of every kind."""
    async with httpx.AsyncClient(**_reaching(served)) as http:
        return await store(http, LARGEST)


def _reaching(served: Served) -> dict[str, Any]:
    """Arguments of a client of the service."""
    headers = {"Authorization": f"Bearer {served.token}"} if served.token else {}
    return {"base_url": served.address, "headers": headers, "timeout": ANSWER_SECONDS}


def _findings(name: str, loads: Sequence[Load]) -> list[Finding]:
    """99th percentiles of response times; infinite if there was a response other than 200."""
    found = []
    names = (f"{name}; health checks", "  rank fetches", "  idle server")
    for what, load, target in zip(names, loads, (TARGET, TARGET, None), strict=True):
        median, longest = 1e3 * quantile(load.latencies, 0.5), 1e3 * max(load.latencies)
        is_right = set(load.statuses) == {200}
        late = 1e3 * quantile(load.latencies, 0.99) if is_right else inf
        found.append(
            Finding(f"{what} (median {median:.1f}, longest {longest:.0f})", late, "ms", at_most(target))
        )
    return found


async def _quiet(served: Served, control: str, asking: Sequence[bytes], seconds: float) -> Sequence[Load]:
    """Load the service with health checks and rank fetches, and the idle server with health checks."""
    return await asyncio.gather(
        offer(served.address, asking[:1], 4, seconds, RATE),
        offer(served.address, asking[1:], 4, seconds, RATE),
        offer(control, asking[:1], 4, seconds, RATE),
    )


async def _attacked(
    served: Served, control: str, request: Worst, asking: Sequence[bytes], seconds: float, memory: Memory
) -> tuple[Sequence[Load], Counter[int]]:
    """Do the same while clients repeat a request; also returns the statuses of their responses."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    attack = context.Process(target=_attack, args=(served.address, served.token, request, there), daemon=True)
    attack.start()
    there.close()
    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(_watch(served, memory))
    try:
        await loop.run_in_executor(None, here.recv)  # wait until they have made their bodies
        loads = await _quiet(served, control, asking, seconds)
        here.send("stop")
        statuses: Counter[int] = await loop.run_in_executor(None, here.recv)
    finally:
        watching.cancel()
        attack.kill()
        attack.join()
    return loads, statuses


@contextmanager
def _bystander() -> Iterator[str]:
    """Run an idle server in a separate process, which sends empty responses; yields its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _answer(line: Connection) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def listen() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        line.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    asyncio.run(listen())


async def _watch(served: Served, memory: Memory) -> None:
    while True:
        own = served.memory
        memory.own = max(memory.own, own)
        memory.all = max(memory.all, own + sum(map(_resident, _descendants(served.process.pid))))
        await asyncio.sleep(LOOK_SECONDS)


def _descendants(process_id: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for listed in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _resident(process_id: int) -> int:
    """Private bytes of a process; memory shared with its parent counts there."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{process_id}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _attack(address: str, token: str | None, request: Worst, line: Connection) -> None:
    """Run the clients, in a separate process, until the parent stops them."""
    os.nice(NICENESS)
    body = None if request.make is None else request.make()
    line.send("ready")
    line.send(asyncio.run(_clients(address, token, request, body, line)))


async def _clients(
    address: str, token: str | None, request: Worst, body: bytes | None, line: Connection
) -> Counter[int]:
    statuses: Counter[int] = Counter()
    clients = [
        asyncio.create_task(_repeat(address, token, request, body, 10_000_019 + 1_000_003 * number, statuses))
        for number in range(CLIENTS)
    ]
    await asyncio.get_running_loop().run_in_executor(None, line.recv)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return statuses


async def _repeat(
    address: str, token: str | None, request: Worst, body: bytes | None, number: int, statuses: Counter[int]
) -> None:
    """Run one client, which repeats the request and ignores all errors."""
    while True:
        number += 1
        content = None if body is None else body.replace(COUNTER, str(number).encode(), 1)
        try:
            async with asyncio.timeout(request.seconds):
                statuses[await _send(address, token, request, content)] += 1
        except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError):
            statuses[0] += 1  # the service closed the connection
            await asyncio.sleep(0.01)


async def _send(address: str, token: str | None, request: Worst, body: bytes | None) -> int:
    """Send a request on a new connection; returns the status of the response."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        fields = ["Connection: close", f"Accept: {request.accept}"]
        if request.encoding:
            fields.append(f"Content-Encoding: {request.encoding}")
        if body is not None:
            fields += [f"Content-Type: {request.media_type}", f"Content-Length: {len(body)}"]
        writer.write(head(request.method, address, request.path, token, *fields))
        writer.write(body or b"")
        with suppress(ConnectionError):  # the response may arrive before the whole body is sent
            await writer.drain()
        status = int((await reader.readline()).split()[1])
        if request.reads:
            while await reader.read(64 * 1024):
                pass
        else:
            await asyncio.sleep(5)
        return status
    except IndexError:
        raise EOFError from None
    finally:
        writer.transport.abort()
