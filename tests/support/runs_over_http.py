"""Runs and agents over HTTP, as their tests speak of them: the agents' side is played by the test."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
from zbv_solver.problem.reading import parse_problem

from support.fake_searches import orders_of
from support.serving import DEADLINE, PROBLEM, Service

MODEL = {"factory": "a.b:c"}
ONCE = {"retries": 0}
GO_ON = {"stop": False, "cause": None, "reason": "", "plan_id": None}


async def import_plan(service: Service, problem: Any = PROBLEM) -> str:
    ranks = orders_of(parse_problem(problem)).all_text()
    answer = await service.http.post("/v1/plans", json={"problem": problem, "ranks": ranks})
    assert answer.status_code in (200, 201), answer.text
    return str(answer.json()["plan_id"])


async def register(service: Service, digit: str, **more: Any) -> str:
    body = {"id": digit * 32, "name": f"host-{digit}", "address": "10.0.0.1", "port": 29500, "slots": 1}
    answer = await service.http.post("/v1/agents", json={**body, "allows": {"models": ["a.*"]}, **more})
    assert answer.status_code == 201, answer.text
    return digit * 32


async def submit(service: Service, **more: Any) -> httpx.Response:
    body = {"plan_id": await import_plan(service), "model": MODEL, "nodes": 2, "steps": 5, "options": ONCE}
    return await service.http.post("/v1/runs", json={**body, **more})


async def work(service: Service, agent: str) -> dict[str, Any]:
    answer = await service.http.get(f"/v1/agents/{agent}/work", params={"wait": 5})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def beat(service: Service, agent: str, run_id: str, step: int | None = None) -> dict[str, Any]:
    ranks = [] if step is None else [{"rank": 0, "step": step, "action": "3F1"}]
    answer = await service.http.post(f"/v1/agents/{agent}/heartbeat", json={"run_id": run_id, "ranks": ranks})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def end(
    service: Service,
    agent: str,
    run_id: str,
    outcome: str,
    *failures: dict[str, Any],
    generation: int = 0,
) -> None:
    body = {"run_id": run_id, "generation": generation, "outcome": outcome, "failures": list(failures)}
    answer = await service.http.post(f"/v1/agents/{agent}/ended", json=body)
    assert answer.status_code == 204, answer.text


async def run_of(service: Service, run_id: str) -> dict[str, Any]:
    answer = await service.http.get(f"/v1/runs/{run_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def started(service: Service, plan_id: str | None = None, **options: Any) -> tuple[str, str, str]:
    """A run and its two agents, each with its work."""
    agents = [await register(service, digit) for digit in "ab"]
    more = {} if plan_id is None else {"plan_id": plan_id}
    run_id = str((await submit(service, options={**ONCE, **options}, **more)).json()["id"])
    for agent in agents:
        await work(service, agent)
    return run_id, agents[0], agents[1]


async def events(service: Service, run_id: str) -> list[dict[str, Any]]:
    answer = await service.http.get(f"/v1/runs/{run_id}/events")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["events"]
    return found


async def until_run(
    service: Service, run_id: str, holds: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Look at a run until something holds of it."""
    until = time.monotonic() + DEADLINE
    while not holds(found := await run_of(service, run_id)):
        assert time.monotonic() < until, f"did not happen in time: {found}"
        await asyncio.sleep(0.02)
    return found


async def page_of(service: Service, path: str) -> str:
    answer = await service.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.text


async def words(service: Service, path: str) -> str:
    """What a reader sees."""
    text = re.sub(r"<(script|style|head)\b.*?</\1>", " ", await page_of(service, path), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
