"""What agents ask for: rank plans at the start of a run, and a heartbeat every two seconds."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import ExitStack

from sqlalchemy import Engine, create_engine, text
from support.postgres import a_server
from zbv_service.client import AgentClient, Client
from zbv_service.settings import async_url

from benchmarks.findings import Finding, at_least, at_most, quantile
from benchmarks.service.load import Load, get, offer, post
from benchmarks.service.served import LONG, Served, plan_to_serve, serving

ALONE_TARGET, BESIDE_TARGET = 20.0, 50.0
"""Targets for the 99th percentile in milliseconds: alone, and while a search runs."""
SEARCH_DEADLINE = 60.0

HEARTBEAT_SECONDS = 2.0
MOST_CPU = 50.0
"""Target for the CPU time of the service in the largest run, in percent of one core."""
_SIZES = 4
"""Number of runs; each has twice the agents of the one before."""
_RANKS = 8
_CONNECTIONS, _RATE = 16, 1000.0
"""Rate of registration: as fast as the service responds."""
_START_SECONDS = 120.0
_SETTLE_SECONDS = 2.0
"""PostgreSQL updates its counters within a second."""


def measure_ranks(seconds: float, connections: int, offered: float) -> list[Finding]:
    """Start a service, store a plan, and fetch its ranks.

    Parameters
    ----------
    seconds
        Duration of each measurement.
    offered
        Fetches per second. On a machine that the client shares, more would measure the client.
    """
    with serving("--searches", "1") as served, Client(served.address) as client:
        document = plan_to_serve()
        plan_id, ranks = client.import_plan(document), document["problem"]["pp_degree"]
        paths = [f"/v1/plans/{plan_id}/ranks/{rank}" for rank in range(ranks)]
        requests = [get(served.address, path, served.token) for path in paths]

        def fetch(seconds: float) -> Load:
            return asyncio.run(offer(served.address, requests, connections, seconds, offered))

        fetch(min(1.0, seconds))  # caches and pools
        cpu = served.cpu_seconds
        alone = fetch(seconds)
        cpu = served.cpu_seconds - cpu
        search_id = _begin_search(client)
        beside = fetch(seconds)
        is_running = client.search(search_id).state == "running"
        client.cancel(search_id)
    return [
        *_answers(f"rank plans, {connections} connections", alone, offered, ALONE_TARGET),
        Finding("  CPU time of the service per fetch", 1e6 * cpu / len(alone.latencies), "µs"),
        *_answers("while a search runs", beside, offered, BESIDE_TARGET),
        Finding("  the search was still running", float(is_running), "", at_least(1)),
        Finding("responses other than 200", _refused(alone) + _refused(beside), "", at_most(0)),
    ]


def _answers(what: str, load: Load, offered: float, slowest: float) -> list[Finding]:
    return [
        Finding(f"{what}, {offered:g}/s offered", load.rate, "/s", at_least(0.98 * offered)),
        Finding("  median", 1e3 * quantile(load.latencies, 0.5), "ms"),
        Finding("  99th percentile", 1e3 * quantile(load.latencies, 0.99), "ms", at_most(slowest)),
    ]


def _begin_search(client: Client) -> str:
    search_id = client.submit(LONG, {"effort": "thorough", "time_limit": 3600}).id
    until = time.monotonic() + SEARCH_DEADLINE
    while client.search(search_id).objective is None:
        if time.monotonic() > until:
            raise TimeoutError("the search did not start; the benchmark needs a running search.")
        time.sleep(0.1)
    return search_id


def measure_heartbeats(agents: int, seconds: float, database: str | None = None) -> list[Finding]:
    """Measure runs of growing size, to show whether the cost per heartbeat grows with the run.

    Parameters
    ----------
    agents
        Number of agents of the largest run; each is one node.
    database
        URL of an empty database; without it, start a PostgreSQL server.
    """
    replicas = max(1, agents // _RANKS)
    sizes = sorted({_RANKS * max(1, replicas >> power) for power in range(_SIZES)})
    findings: list[Finding] = []
    with ExitStack() as stack:
        url = database or stack.enter_context(a_server()).url
        served = stack.enter_context(serving("--database", url))
        for size in sizes:
            findings += asyncio.run(_measure(served, url, size, seconds, is_largest=size == sizes[-1]))
    return findings


def _counters(engine: Engine | None) -> tuple[int, int]:
    """Transactions of a PostgreSQL database, and rows that it has read."""
    if engine is None:
        return 0, 0
    query = text(
        "SELECT xact_commit, tup_fetched + tup_returned FROM pg_stat_database "
        "WHERE datname = current_database()"
    )
    with engine.connect() as connection:
        transactions, rows = connection.execute(query).one()
    return transactions, rows


async def _measure(served: Served, url: str, size: int, seconds: float, *, is_largest: bool) -> list[Finding]:
    parsed = async_url(url)
    engine = create_engine(parsed) if parsed.get_backend_name() == "postgresql" else None
    with AgentClient(served.address, timeout=_START_SECONDS) as client:
        rate, names = size / HEARTBEAT_SECONDS, await _register(served, size)
        idle = [post(served.address, f"/v1/agents/{each}/heartbeat", b"{}", served.token) for each in names]
        begun = asyncio.create_task(asyncio.to_thread(_begin, client, size))
        # send heartbeats from the beginning, so that no agent is lost before the run begins
        while not begun.done():
            await offer(served.address, idle, size, HEARTBEAT_SECONDS, rate)
        run_id, agent_ids = await begun
        beats = _beats(served, run_id, agent_ids)
        await offer(served.address, beats, size, HEARTBEAT_SECONDS, rate)
        before, cpu, began = _counters(engine), served.cpu_seconds, time.perf_counter()
        load = await offer(served.address, beats, size, seconds, rate)
        cpu, took = served.cpu_seconds - cpu, time.perf_counter() - began
        if engine is not None:
            await asyncio.sleep(_SETTLE_SECONDS)
        after = _counters(engine)
        state, generation, lost = await asyncio.to_thread(_end, client, run_id, agent_ids)
    if engine is not None:
        engine.dispose()
    is_undisturbed, count = state == "running" and generation == 0, len(load.latencies)
    transactions, rows = after[0] - before[0], after[1] - before[1]
    return [
        Finding(f"{size} agents: heartbeats", count, ""),
        Finding("  responses other than 200", _refused(load), "", at_most(0)),
        Finding("  CPU of the service", 100 * cpu / took, "%", at_most(MOST_CPU if is_largest else None)),
        Finding("  CPU for one heartbeat", 1e3 * cpu / count, "ms"),
        Finding("  median", 1e3 * quantile(load.latencies, 0.5), "ms"),
        Finding("  p99", 1e3 * quantile(load.latencies, 0.99), "ms"),
        Finding("  transactions for one", transactions / count, ""),
        Finding("  rows read for one", rows / count, ""),
        Finding("  agents lost", lost, "", at_most(0)),
        Finding("  the run continued undisturbed", float(is_undisturbed), "", at_least(1)),
    ]


async def _register(served: Served, size: int) -> list[str]:
    """Register this number of agents; returns their ids."""
    names = [uuid.uuid4().hex for _ in range(size)]
    common = {"name": "agent", "address": "127.0.0.1", "port": 1024, "slots": 1, "allows": {"models": ["*"]}}
    requests = [
        post(served.address, "/v1/agents", json.dumps({**common, "id": name}).encode(), served.token)
        for name in names
    ]
    load = await offer(served.address, requests, min(size, _CONNECTIONS), (size + 0.5) / _RATE, _RATE)
    if load.statuses != {201: size}:
        raise RuntimeError(f"registering {size} agents was answered {load.statuses}; all must be 201.")
    return names


def _begin(client: AgentClient, size: int) -> tuple[str, list[str]]:
    """Start a run of all agents; returns its id, and the agents' ids by node rank."""
    plan_id = client.import_plan(plan_to_serve(_RANKS, 2 * _RANKS))
    model = {"factory": "bench.model:build"}
    options = {"data_parallel": size // _RANKS, "retries": 0}
    run = client.submit_run(plan_id, model, nodes=size, steps=2**31 - 1, options=options)
    deadline = time.monotonic() + _START_SECONDS
    while (found := client.run(run.id)).state == "waiting":
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run of {size} agents did not start within {_START_SECONDS:g} s.")
        time.sleep(0.2)
    return run.id, [str(node["agent_id"]) for node in found.document["members"]]


def _beats(served: Served, run_id: str, agent_ids: list[str], steps: int = 16) -> list[bytes]:
    """Yield one heartbeat of every agent by node rank, then those of the next step, and so on."""
    return [
        post(
            served.address,
            f"/v1/agents/{agent_id}/heartbeat",
            json.dumps(
                {"run_id": run_id, "ranks": [{"rank": rank, "step": step, "action": f"{rank}F{step}"}]}
            ).encode(),
            served.token,
        )
        for step in range(steps)
        for rank, agent_id in enumerate(agent_ids)
    ]


def _refused(load: Load) -> int:
    return sum(count for status, count in load.statuses.items() if status != 200)


def _end(client: AgentClient, run_id: str, agent_ids: list[str]) -> tuple[str, int, int]:
    """Cancel the run and remove its agents; returns its state, its generation, and the lost agents."""
    run = client.run(run_id)
    present = {str(agent["id"]) for agent in client.agents()}
    client.cancel_run(run_id)
    for agent_id in agent_ids:
        client.remove_agent(agent_id)
    return run.state, int(run.document["generation"]), len(set(agent_ids) - present)
