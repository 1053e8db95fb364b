"""Runs with agents that the test simulates, so that no rank needs torch."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace

from support.rank_traces import trace_documents
from zbv_service.client import AgentClient, NodeWork
from zbv_solver.plans.plan import Plan, plan_json

from web.browsing import Service

MODEL = {"factory": "a.b:c", "arguments": {"layers": 8}}


@dataclass
class PlayedRun:
    """A run, and the agents that the test plays: one per rank, each with its work."""

    client: AgentClient
    plan: Plan
    id: str
    url: str
    """Its page."""
    agents: list[tuple[str, NodeWork]]

    def beat(self, step: int) -> None:
        """Every rank is in a step."""
        for rank, (agent, _) in enumerate(self.agents):
            places = [{"rank": rank, "step": step, "action": f"{rank}F1"}]
            self.client.heartbeat(agent, {"run_id": self.id, "ranks": places})

    def measured(self) -> None:
        """Every rank sends six steps, in which the W's of rank 2 take twice as long as planned."""
        costs, stages = self.plan.problem.costs, self.plan.problem.placement.stages_of[2]
        weights = tuple(cost * (2 if at in stages else 1) for at, cost in enumerate(costs.backward_weight))
        actual = replace(self.plan.problem, costs=replace(costs, backward_weight=weights))
        made = trace_documents(actual, self.plan.orders, plan_id=self.plan.plan_id, steps=6)
        for entry in made[0]["steps"]:
            entry["loss"] = 4.0 - 0.1 * entry["step"]
        for rank, (agent, work) in enumerate(self.agents):
            self.client.put_trace(agent, work, rank, json.dumps(made[rank]).encode())

    def log(self, rank: int, text: str) -> None:
        """A rank sends the end of its log."""
        agent, work = self.agents[rank]
        self.client.put_log(agent, work, rank, text.encode())

    def stop(self) -> None:
        """All nodes stop, and their agents leave."""
        for agent, _ in self.agents:
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
    return PlayedRun(client, plan, run.id, f"{service.url}/runs/{run.id}", works)
