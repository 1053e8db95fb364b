"""Runs with agents that the test simulates, so that no rank needs torch."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from support.rank_traces import trace_documents
from zbv_service.client import AgentClient, AgentGone, NodeWork
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.problem import Problem

from web.browsing import Service

MODEL = {"factory": "a.b:c", "arguments": {"layers": 8}}


@dataclass
class PlayedRun:
    """A run, and the agents that the test plays: one per rank, each with its work."""

    client: AgentClient
    id: str
    url: str
    """Its page."""
    agents: list[tuple[str, NodeWork]]

    def beat(self, step: int) -> None:
        """Every rank is in a step."""
        for rank, (agent, _) in enumerate(self.agents):
            places = [{"rank": rank, "step": step, "action": f"{rank}F1"}]
            self.client.heartbeat(agent, {"run_id": self.id, "ranks": places})

    def measured(self, documents: Sequence[dict[str, Any]]) -> None:
        """These ranks send their measurements."""
        for document in documents:
            rank = document["rank"]
            agent, work = self.agents[rank]
            self.client.put_trace(agent, work, rank, json.dumps(document).encode())

    def log(self, rank: int, text: str) -> None:
        """A rank sends the end of its log."""
        agent, work = self.agents[rank]
        self.client.put_log(agent, work, rank, text.encode())

    def stop(self) -> None:
        """All nodes stop, and their agents leave. Agents that were silent for long are lost already."""
        for agent, _ in self.agents:
            with suppress(AgentGone):
                end = {"run_id": self.id, "generation": 0, "outcome": "stopped", "failures": []}
                self.client.report_end(agent, end)
            self.client.remove_agent(agent)


def play(service: Service, plan: Plan, *, steps: int = 40) -> PlayedRun:
    """Have a plan run, and take its work: the run is starting then."""
    client = service.client
    client.import_plan(plan_json(plan))
    names = [secrets.token_hex(16) for _ in range(plan.problem.pp_degree)]
    for rank, name in enumerate(names):
        node = {"id": name, "name": f"node-{rank}", "address": "10.0.0.1", "port": 29500, "slots": 1}
        client.register_agent({**node, "allows": {"models": ["a.*"]}})
    run = client.submit_run(plan.plan_id, MODEL, nodes=len(names), steps=steps, options={"retries": 0})
    works = [(name, work) for name in names if (work := client.next_work(name, 20)) is not None]
    works.sort(key=lambda agent: agent[1].node_rank)
    return PlayedRun(client, run.id, f"{service.url}/runs/{run.id}", works)


def slower(problem: Problem, rank: int, factor: float) -> Problem:
    """The problem with a rank's W's this much longer."""
    costs, stages = problem.costs, problem.placement.stages_of[rank]
    weights = tuple(
        cost * (factor if stage in stages else 1.0) for stage, cost in enumerate(costs.backward_weight)
    )
    return replace(problem, costs=replace(costs, backward_weight=weights))


def traces(plan: Plan, problem: Problem) -> list[dict[str, Any]]:
    """The traces of six steps of a plan's ranks under a problem's costs, with losses and a little noise."""
    made = trace_documents(problem, plan.orders, plan_id=plan.plan_id, steps=6)
    noise = Random(0)
    for document in made:
        for entry in document["steps"]:
            entry["seconds"] *= 1 + 0.01 * noise.random()
            if document["pp_rank"] == 0:
                entry["loss"] = round(4.0 / (1 + 0.1 * entry["step"]), 4)
    return made
