"""Runs with agents that the test simulates, so that no rank needs torch."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from support.rank_traces import trace_documents
from zbv_service.client.tokens import find
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem

from web.browsing import Service

MODEL = {"factory": "a.b:c", "arguments": {"layers": 8}}


@dataclass
class PlayedRun:
    """A run, and the agents that the test plays: one per rank."""

    service: Service
    plan: Plan
    id: str
    agents: list[str]

    @property
    def url(self) -> str:
        """Its page."""
        return f"{self.service.url}/runs/{self.id}"

    def beat(self, step: int | None) -> None:
        """Every rank is in a step."""
        for rank, agent in enumerate(self.agents):
            places = [] if step is None else [{"rank": rank, "step": step, "action": f"{rank}F1"}]
            self.service.call(f"/v1/agents/{agent}/heartbeat", {"run_id": self.id, "ranks": places})

    def measured(self, documents: Sequence[dict[str, Any]]) -> None:
        """These ranks send their measurements."""
        for document in documents:
            self._put(document["rank"], "trace", json.dumps(document).encode(), "application/json")

    def log(self, rank: int, text: str) -> None:
        """A rank sends the end of its log."""
        self._put(rank, "log", text.encode(), "text/plain")

    def end(self, outcome: str, rank: int | None = None, **failure: Any) -> None:
        """All nodes end; ``failure`` is that of a rank. Agents that were silent for long are lost already."""
        for index, agent in enumerate(self.agents):
            failed = [{"rank": rank, **failure}] if index == rank else []
            own = "failed" if failed else "stopped" if failure else outcome
            body = {"run_id": self.id, "generation": 0, "outcome": own, "failures": failed}
            with suppress(urllib.error.HTTPError):
                _send(self.service, "POST", f"/v1/agents/{agent}/ended", json.dumps(body).encode())
            _send(self.service, "DELETE", f"/v1/agents/{agent}")

    def _put(self, rank: int, kind: str, body: bytes, media_type: str) -> None:
        path = f"/v1/agents/{self.agents[rank]}/runs/{self.id}/generations/0/ranks/{rank}/{kind}"
        _send(self.service, "PUT", path, body, media_type)


def play(service: Service, plan: Plan, *, steps: int = 40, **options: Any) -> PlayedRun:
    """Have a plan run, and take its work: the run is starting then."""
    service.import_plan(plan)
    agents = []
    for rank in range(plan.problem.pp_degree):
        body = {"id": secrets.token_hex(16), "name": f"node-{rank}", "address": "10.0.0.1", "port": 29500}
        service.call("/v1/agents", {**body, "slots": 1, "allows": {"models": ["a.*"]}})
        agents.append(body["id"])
    run = service.call(
        "/v1/runs",
        {
            "plan_id": plan.plan_id,
            "model": MODEL,
            "nodes": len(agents),
            "steps": steps,
            "options": {"retries": 0, **options},
        },
    )
    for agent in agents:
        service.call(f"/v1/agents/{agent}/work?wait=20")
    nodes = sorted(service.call(f"/v1/runs/{run['id']}")["members"], key=lambda node: node["node_rank"])
    return PlayedRun(service, plan, str(run["id"]), [str(node["agent_id"]) for node in nodes])


def slower(problem: Problem, rank: int, factor: float) -> Problem:
    """The problem with a rank's W's this much longer."""
    costs, stages = problem.costs, problem.placement.stages_of[rank]
    weights = tuple(
        cost * (factor if stage in stages else 1.0) for stage, cost in enumerate(costs.backward_weight)
    )
    return replace(problem, costs=replace(costs, backward_weight=weights))


def traces(
    plan: Plan, problem: Problem, *, steps: int = 6, first_step: int = 0, ahead: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The traces of a plan's ranks under the costs of a problem, with losses and a little noise."""
    made = trace_documents(
        problem, plan.orders, plan_id=plan.plan_id, steps=steps, first_step=first_step, ahead=ahead
    )
    noise = Random(first_step)
    for document in made:
        for entry in document["steps"]:
            entry["seconds"] *= 1 + 0.01 * noise.random()
            if document["pp_rank"] == 0:
                entry["loss"] = round(4.0 / (1 + 0.1 * entry["step"]), 4)
    return made


def _send(
    service: Service, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> None:
    fields = {"Content-Type": kind, "Authorization": f"Bearer {find(service.url)}"}
    request = urllib.request.Request(service.url + path, body or None, fields, method=method)
    with urllib.request.urlopen(request, timeout=30):
        pass
