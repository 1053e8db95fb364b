"""The largest objects of every kind that a service accepts, and every address that reads them.

A test reads each once and measures the event loop; the benchmark ``hostile`` repeats each from 16 clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import httpx

from support.worst_bodies import COSTS

LAYOUTS: dict[str, Any] = {
    "model": {"presets": ["llama-3.1-8b"]},
    "cluster": {"nodes": 1, "gpus_per_node": 8, "device": "h100"},
    "global_batch": 8,
    "options": {"time_limit": 1},
}
FOUR_RANKS: dict[str, Any] = {"pp_degree": 4, "microbatches": 4, "costs": COSTS}
ENDED = ("done", "cancelled", "failed", "infeasible", "succeeded")
POLL_SECONDS = 0.1
SLOTS = 256
TALKATIVE = 4
"""Nodes of a run that send as long reports, logs and events as they may."""
TEXT = "x" * 190


@dataclass(frozen=True)
class Amounts:
    """How many values and rows there are: those of the limits, or less in tests."""

    features: int  # of the problem, which has one rank
    microbatches: int
    samples: int  # of the jitter of each search
    rows: int  # searches, agents and runs in lists
    nodes: int  # of a run with 256 ranks on each
    variant: int = 0  # another one gives other searches, so the service does not know their answers


SMALLEST = Amounts(features=1, microbatches=4, samples=1, rows=1, nodes=1)
LARGEST = Amounts(features=16, microbatches=100_000, samples=20_000, rows=500, nodes=64)


@dataclass(frozen=True)
class Stored:
    """Ids of what :func:`store` has stored."""

    search: str
    plan: str
    layouts: str
    run: str
    failed_run: str
    agent: str
    worker: str


@dataclass(frozen=True)
class Read:
    """A request that reads; ``route`` is the path of its route."""

    route: str
    path: str
    accept: str = "application/json"


def problem(sizes: Amounts) -> dict[str, Any]:
    """A problem whose microbatches differ, with as many values as its sizes say."""
    names = [f"f{index}" for index in range(sizes.features)]
    amount = {"fixed": 1 + sizes.variant, **dict.fromkeys(names, 1)}
    half = {name: -value / 2 for name, value in amount.items()}
    features = {name: [(j * (k + 3)) % 7 for j in range(sizes.microbatches)] for k, name in enumerate(names)}
    return {
        "pp_degree": 1,
        "placement": "single",
        "microbatches": sizes.microbatches,
        "costs": dict.fromkeys(COSTS, amount),
        "memory": {"forward": amount, "backward_input": half, "backward_weight": half},
        "features": features,
    }


def jitter(sizes: Amounts) -> dict[str, Any]:
    half = max(1, sizes.samples // 2)
    samples = [1 + 1 / (3 + index) for index in range(half)]
    return {"action": {"samples": samples}, "transfer": {"samples": samples}}


def agent(sizes: Amounts, models: str = "a.*") -> dict[str, Any]:
    """An agent that says as much about itself as it may, and allows these models."""
    count = 40 if sizes.rows > 1 else 1
    return {
        "id": uuid4().hex,
        "name": "host",
        "address": "10.0.0.1",
        "port": 29500,
        "slots": SLOTS,
        "devices": [TEXT] * (4 * count),
        "allows": {"models": [models, *(f"{TEXT}{index}" for index in range(count))]},
    }


def run(plan: str, sizes: Amounts, nodes: int, **options: Any) -> dict[str, Any]:
    """A run of a plan of four ranks with 256 ranks on each node, and long arguments."""
    size = 16_000 if sizes.rows > 1 else 1
    return {
        "plan_id": plan,
        "model": {"factory": "a.b:c", "arguments": {"text": "x" * size}},
        "search_options": {"jitter": jitter(sizes)},
        "nodes": nodes,
        "steps": 5,
        "options": {"data_parallel": nodes * SLOTS // 4, **options},
    }


Post = Callable[[str, Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]
Apart = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function in another thread."""


async def store(http: httpx.AsyncClient, sizes: Amounts, apart: Apart = asyncio.to_thread) -> Stored:
    """Store the objects, over HTTP; ``apart`` makes and reads large bodies, which takes this client long."""
    options = {"effort": "quick", "time_limit": 1, "jitter": None}

    def post(path: str, make: Callable[[], dict[str, Any]]) -> Awaitable[dict[str, Any]]:
        return _post(http, path, make, apart)

    search = await post(
        "/v1/searches", lambda: {"problem": problem(sizes), "options": {**options, "jitter": jitter(sizes)}}
    )
    layouts = await post("/v1/layouts", lambda: {**LAYOUTS, "points": True})
    short = await post("/v1/searches", lambda: {"problem": FOUR_RANKS, "options": options})
    ended = [await _ended(http, f"/v1/searches/{some['id']}", apart) for some in (search, layouts, short)]
    for seed in range(sizes.rows):
        varied = {**options, "seed": seed + sizes.variant * sizes.rows}
        stored = await post("/v1/searches", partial(_small_search, sizes, varied))
        # Lists show it however it ends, and its computation would disturb measurements.
        await http.post(f"/v1/searches/{stored['id']}/cancel")
    plan, for_runs = str(ended[0]["plan_id"]), str(ended[2]["plan_id"])
    running, failed, worker = await _runs(http, post, for_runs, sizes)
    others = [agent(sizes, "nothing") for _ in range(sizes.rows)]
    for each in others:
        await post("/v1/agents", partial(dict, each))
        await post("/v1/runs", lambda: {**run(for_runs, sizes, 1), "model": {"factory": "nobody:c"}})
    return Stored(str(search["id"]), plan, str(layouts["id"]), running, failed, others[0]["id"], worker)


async def _runs(http: httpx.AsyncClient, post: Post, plan: str, sizes: Amounts) -> tuple[str, str, str]:
    """A run that goes on, one that failed on all nodes, and an agent of them."""
    agents = [agent(sizes) for _ in range(sizes.nodes)]
    for each in agents:
        await post("/v1/agents", partial(dict, each))
    failed = await post("/v1/runs", lambda: run(plan, sizes, sizes.nodes, retries=0))
    work = [await _work(http, each["id"]) for each in agents]
    for index, (each, part) in enumerate(zip(agents, work, strict=True)):
        detail = "y" * (3_800 if index < TALKATIVE < sizes.nodes else 1)
        failures = [{"kind": "error", "rank": rank, "detail": detail} for rank in _ranks(part)]
        report = {"run_id": failed["id"], "generation": 0, "outcome": "failed", "failures": failures}
        await post(f"/v1/agents/{each['id']}/ended", partial(dict, report))
    running = await post("/v1/runs", lambda: run(plan, sizes, sizes.nodes))
    for index, each in enumerate(agents):
        part = await _work(http, each["id"])
        ranks = [{"rank": rank, "step": 1, "action": "1F2"} for rank in _ranks(part)]
        beat = {"run_id": running["id"], "ranks": ranks}
        await post(f"/v1/agents/{each['id']}/heartbeat", partial(dict, beat))
        if index >= TALKATIVE:
            continue
        address = f"/v1/agents/{each['id']}/runs/{running['id']}/generations/0/ranks/{_ranks(part)[0]}"
        log = "z" * (256 * 1024 if sizes.rows > 1 else 1)
        (await http.put(f"{address}/log", content=log)).raise_for_status()
        odd = [{"kind": "non_finite", "step": step, "what": TEXT, "value": "nan"} for step in range(100)]
        body = {"rank": _ranks(part)[0], "events": odd[: 100 if sizes.rows > 1 else 1]}
        (await http.put(f"{address}/events", json=body)).raise_for_status()
    return str(running["id"]), str(failed["id"]), str(agents[0]["id"])


def _ranks(work: dict[str, Any]) -> range:
    return range(work["node_rank"] * SLOTS, (work["node_rank"] + 1) * SLOTS)


async def _work(http: httpx.AsyncClient, agent_id: str) -> dict[str, Any]:
    answer = (await http.get(f"/v1/agents/{agent_id}/work", params={"wait": 30})).raise_for_status()
    work: dict[str, Any] = answer.json()
    return work


async def _post(
    http: httpx.AsyncClient, path: str, make: Callable[[], dict[str, Any]], apart: Apart
) -> dict[str, Any]:
    body = await apart(lambda: json.dumps(make()).encode())
    answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
    answer.raise_for_status()
    document: dict[str, Any] = await apart(answer.json) if answer.content else {}
    return document


def _small_search(sizes: Amounts, options: dict[str, Any]) -> dict[str, Any]:
    return {"problem": problem(SMALLEST), "options": {**options, "jitter": jitter(sizes)}}


async def _ended(http: httpx.AsyncClient, path: str, apart: Apart) -> dict[str, Any]:
    while True:
        answer = (await http.get(path)).raise_for_status()
        document: dict[str, Any] = await apart(answer.json)
        if document["state"] in ENDED:
            return document
        await asyncio.sleep(POLL_SECONDS)


def reads(stored: Stored) -> list[Read]:
    """Every address that reads a stored object or a list, with the largest page of each list."""
    search, plan, layouts = f"/{stored.search}", f"/{stored.plan}", f"/{stored.layouts}"
    found: list[Read] = []

    def add(route: str, *paths: str, accept: str = "application/json") -> None:
        found.extend(Read(route, path, accept) for path in paths)

    add("/v1/searches", "/v1/searches?limit=1000")
    add("/v1/searches/{search_id}", f"/v1/searches{search}", f"/v1/searches{layouts}")
    add("/v1/searches/{search_id}/problem", f"/v1/searches{search}/problem", f"/v1/searches{layouts}/problem")
    add(
        "/v1/searches/{search_id}/events",
        f"/v1/searches{search}/events?after=0",
        f"/v1/searches{search}/events",
        f"/v1/searches{layouts}/events?after=0",
    )
    add("/v1/plans", "/v1/plans?limit=1000")
    add("/v1/plans/{plan_id}", f"/v1/plans{plan}")
    add("/v1/plans/{plan_id}/ranks/{rank}", f"/v1/plans{plan}/ranks/0")
    add("/v1/plans/{plan_id}/simulation", f"/v1/plans{plan}/simulation?scenarios=2")
    add("/v1/plans/{plan_id}/export/{format_name}", f"/v1/plans{plan}/export/torch-csv")
    add("/v1/runs", "/v1/runs?limit=1000")
    both = (stored.run, stored.failed_run)
    add("/v1/runs/{run_id}", *(f"/v1/runs/{each}" for each in both))
    add("/v1/runs/{run_id}/events", *(f"/v1/runs/{each}/events" for each in both))
    add("/v1/runs/{run_id}/events", f"/v1/runs/{stored.failed_run}/events", accept="text/event-stream")
    add("/v1/runs/{run_id}/trace", f"/v1/runs/{stored.run}/trace")
    add("/v1/runs/{run_id}/steps", f"/v1/runs/{stored.run}/steps")
    add("/v1/runs/{run_id}/ranks/{rank}/log", f"/v1/runs/{stored.run}/ranks/0/log")
    add("/v1/agents", "/v1/agents?limit=10000")
    add("/v1/agents/{agent_id}", f"/v1/agents/{stored.agent}")
    add("/v1/agents/{agent_id}/work", f"/v1/agents/{stored.worker}/work")
    add("/metrics", "/metrics")
    add("/healthz", "/healthz")
    add("/readyz", "/readyz")
    add("/openapi.json", "/openapi.json")
    page = "text/html"
    add("/", "/", accept=page)
    add("/api", "/api", accept=page)
    add("/new", f"/new?from={stored.search}", f"/new?from={stored.plan}", accept=page)
    for name in ("searches", "plans", "runs"):
        add(f"/{name}", f"/{name}?limit=1000", accept=page)
    add("/agents", "/agents?limit=10000", accept=page)
    add("/layouts", "/layouts", f"/layouts?from={stored.layouts}", accept=page)
    add("/layouts/{search_id}", f"/layouts{layouts}", accept=page)
    add("/layouts/{search_id}/layouts.json", f"/layouts{layouts}/layouts.json", accept=page)
    add("/searches/{search_id}", f"/searches{search}", accept=page)
    add("/plans/{plan_id}", f"/plans{plan}", accept=page)
    add("/plans/{plan_id}/actions", f"/plans{plan}/actions", accept=page)
    add("/plans/{plan_id}/thumbnail.png", f"/plans{plan}/thumbnail.png", accept=page)
    add("/plans/{plan_id}/compare", f"/plans{plan}/compare", accept=page)
    add("/plans/{plan_id}/baselines/{name}/actions", f"/plans{plan}/baselines/1f1b/actions", accept=page)
    add("/plans/{plan_id}/frontier", f"/plans{plan}/frontier", accept=page)
    add("/runs/{run_id}", *(f"/runs/{each}" for each in both), accept=page)
    add("/runs/{run_id}/measured", f"/runs/{stored.run}/measured", accept=page)
    add("/errors/{name}", "/errors/not-found", accept=page)
    add("/sign-in", "/sign-in", accept=page)
    return found
