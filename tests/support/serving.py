"""The real application in this process, over ASGI; of runs, the test plays the agents' side."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from zbv_solver.problem.reading import parse_problem

from support.fake_searches import orders_of
from support.processes import DEADLINE as DEADLINE

PROBLEM: dict[str, Any] = {
    "pp_degree": 2,
    "microbatches": 4,
    "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1},
    "memory": {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": 8},
}
PLAN: dict[str, Any] = {"problem": PROBLEM, "ranks": orders_of(parse_problem(PROBLEM)).all_text()}
"""A valid plan: one microbatch after another."""
MODEL = {"factory": "a.b:c"}
Document = dict[str, Any]


@dataclass
class Service:
    app: FastAPI
    http: httpx.AsyncClient

    async def get(self, path: str, **params: Any) -> Any:
        answer = await self.http.get(path, params=params or None)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def listed(self, kind: str) -> Any:
        return (await self.get(f"/v1/{kind}"))[kind]

    async def submit(self, problem: Any = PROBLEM, **options: Any) -> httpx.Response:
        return await self.http.post("/v1/searches", json={"problem": problem, "options": options})

    async def search(self, search_id: str) -> Any:
        return await self.get(f"/v1/searches/{search_id}")

    async def until(self, search_id: str, holds: Callable[[Document], object]) -> Any:
        return await self._until(f"/v1/searches/{search_id}", holds)

    async def begun(self, problem: Any = PROBLEM, **options: Any) -> str:
        """Submit a search and wait until it has found a plan; its id."""
        search_id: str = (await self.submit(problem, **options)).json()["id"]
        await self.until(search_id, lambda found: found["objective"] is not None)
        return search_id

    async def ended(self, search_id: str) -> Any:
        """Wait for a search to end."""
        return await self.until(search_id, lambda found: found["state"] not in ("queued", "running"))

    async def done(self, problem: Any = PROBLEM, **options: Any) -> Any:
        """Submit a search and wait for its end."""
        return await self.ended((await self.submit(problem, **options)).json()["id"])

    async def events_of_search(self, search_id: str) -> Any:
        return (await self.get(f"/v1/searches/{search_id}/events", after=0))["events"]

    async def cancel(self, search_id: str) -> httpx.Response:
        return await self.http.post(f"/v1/searches/{search_id}/cancel")

    async def import_plan(self, problem: Any = PROBLEM) -> str:
        """Store a plan of a problem; its id."""
        ranks = orders_of(parse_problem(problem)).all_text()
        answer = await self.http.post("/v1/plans", json={"problem": problem, "ranks": ranks})
        assert answer.status_code in (200, 201), answer.text
        return str(answer.json()["plan_id"])

    async def register(self, digit: str, **more: Any) -> str:
        """Register an agent; its id."""
        body = {"id": digit * 32, "name": f"host-{digit}", "address": "10.0.0.1", "port": 29500, "slots": 1}
        answer = await self.http.post("/v1/agents", json={**body, "allows": {"models": ["a.*"]}, **more})
        assert answer.is_success, answer.text
        return digit * 32

    async def submit_run(self, **more: Any) -> httpx.Response:
        """Ask for a run, by default of an imported plan on two nodes without retries."""
        body = {"model": MODEL, "nodes": 2, "steps": 5, "options": {"retries": 0}}
        plan = {} if "plan_id" in more else {"plan_id": await self.import_plan()}
        return await self.http.post("/v1/runs", json={**body, **plan, **more})

    async def started_run(self, plan_id: str | None = None, **options: Any) -> tuple[str, str, str]:
        """A run and its two agents, each with its work."""
        agents = [await self.register(digit) for digit in "ab"]
        more = {} if plan_id is None else {"plan_id": plan_id}
        run_id = str((await self.submit_run(options={"retries": 0, **options}, **more)).json()["id"])
        for agent in agents:
            await self.work(agent)
        return run_id, agents[0], agents[1]

    async def work(self, agent: str) -> Any:
        """What an agent is to run."""
        return await self.get(f"/v1/agents/{agent}/work", wait=30)

    async def beat(self, agent: str, run_id: str, step: int | None = None) -> Any:
        """The answer to the heartbeat of an agent."""
        ranks = [] if step is None else [{"rank": 0, "step": step, "action": "3F1"}]
        body = {"run_id": run_id, "ranks": ranks}
        answer = await self.http.post(f"/v1/agents/{agent}/heartbeat", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def end_node(
        self, agent: str, run_id: str, outcome: str, *failures: Any, generation: int = 0
    ) -> None:
        body = {"run_id": run_id, "generation": generation, "outcome": outcome, "failures": list(failures)}
        answer = await self.http.post(f"/v1/agents/{agent}/ended", json=body)
        assert answer.status_code == 204, answer.text

    async def run(self, run_id: str) -> Any:
        return await self.get(f"/v1/runs/{run_id}")

    async def until_run(self, run_id: str, holds: Callable[[Document], object]) -> Any:
        return await self._until(f"/v1/runs/{run_id}", holds)

    async def events_of_run(self, run_id: str) -> Any:
        return (await self.get(f"/v1/runs/{run_id}/events"))["events"]

    async def page(self, path: str) -> str:
        """A page that exists."""
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        return answer.text

    async def words(self, path: str) -> str:
        """What a reader of a page sees."""
        text = re.sub(r"<(script|style|head)\b.*?</\1>", " ", await self.page(path), flags=re.DOTALL)
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())

    async def _until(self, path: str, holds: Callable[[Document], object]) -> Any:
        until = time.monotonic() + DEADLINE
        while not holds(found := await self.get(path)):
            assert time.monotonic() < until, f"did not happen in time: {found}"
            await asyncio.sleep(0.02)
        return found


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


Serving = Callable[..., AbstractAsyncContextManager[Service]]
"""``async with serving("held", searches=1) as service``: a fake search's name, and changed settings."""
