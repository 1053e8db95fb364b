"""A run of two ranks on two agents. The test plays the agents, which send what their ranks measured."""

from __future__ import annotations

import gzip
import json
from typing import Any, Self

import httpx
from zbv_solver.problem.reading import parse_problem

from support.fake_searches import orders_of
from support.rank_traces import trace_documents
from support.serving import PROBLEM, Service

PACKED = {"content-type": "application/json", "content-encoding": "gzip"}


class TwoRanks:
    """The run, in its current generation."""

    def __init__(self, service: Service, plan_id: str, run_id: str, *agents: str):
        self.service, self.plan_id, self.id, self.agents = service, plan_id, run_id, agents
        self.generation = 0

    @classmethod
    async def begin(cls, service: Service, problem: Any = PROBLEM, **options: Any) -> Self:
        """Run a plan of a problem."""
        plan_id = await service.import_plan(problem)
        return cls(service, plan_id, *await service.started_run(plan_id=plan_id, **options))

    async def put(self, rank: int, what: Any, kind: str = "trace", **other: Any) -> httpx.Response:
        """Send a trace, a log or events. Another agent, run or generation may claim to be the rank's."""
        content = what if isinstance(what, bytes) else json.dumps(what).encode()
        agent, run_id = other.get("agent", self.agents[rank]), other.get("run_id", self.id)
        generation = other.get("generation", self.generation)
        address = f"/v1/agents/{agent}/runs/{run_id}/generations/{generation}/ranks/{rank}/{kind}"
        return await self.service.http.put(address, content=gzip.compress(content), headers=PACKED)

    async def send(self, rank: int, what: Any, kind: str = "trace") -> None:
        """Send something that is accepted."""
        answer = await self.put(rank, what, kind)
        assert answer.status_code == 204, answer.text

    def traces(self, document: Any = PROBLEM, **how: Any) -> list[dict[str, Any]]:
        """What the ranks measure if a problem has their costs."""
        problem = parse_problem(document)
        return trace_documents(problem, orders_of(problem), **{"plan_id": self.plan_id, **how})

    async def measured(self, document: Any, **how: Any) -> None:
        """Both ranks send these traces."""
        for rank, trace in enumerate(self.traces(document, **how)):
            await self.send(rank, trace)

    async def restart(self) -> None:
        """Rank 0 fails, and both ranks start again."""
        failure = {"kind": "error", "rank": 0, "detail": "d"}
        for agent, outcome, failures in zip(self.agents, ("failed", "stopped"), ([failure], []), strict=True):
            await self.service.end_node(agent, self.id, outcome, *failures, generation=self.generation)
        self.generation += 1
        for agent in self.agents:
            await self.service.work(agent)
