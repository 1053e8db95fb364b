"""Searches, plans, agents and runs as the database takes them, with made-up content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, event
from zbv_service.database import AgentTable, Database, PlanTable, RunTable, SearchTable
from zbv_service.database.engine import Base
from zbv_service.records.agents import AgentRequest, AllowsDocument, Heartbeat, RankPlace
from zbv_service.records.plans import NewPlan, PlanSummaryDocument
from zbv_service.records.runs import NewRun
from zbv_service.records.searches import NewSearch
from zbv_service.runs.scheduler import decide


def a_search(name: str, key: str | None = None, **changes: Any) -> NewSearch:
    """A search of two ranks and four microbatches.

    ``changes`` are of its summary, or ``created_by``.
    """
    created_by = changes.pop("created_by", None)
    summary = {"pp_degree": 2, "microbatches": 4, "placement": "v", "objective": "span", **changes}
    return NewSearch(name, key or name, b"problem", summary, {}, created_by)


def a_layout_search(name: str) -> NewSearch:
    summary = {"devices": 8, "global_batch": 64, "sequence_length": 128, "layouts": 3}
    return NewSearch(name, name, b"request", summary, {}, kind="layouts")


async def claimed(table: SearchTable, name: str = "a", key: str | None = None) -> Any:
    """Add a search, and claim the next one."""
    await table.add(a_search(name, key))
    return await next_of(table)


async def next_of(table: SearchTable, owner: str = "me", seconds: float = 60) -> Any:
    return await table.claim(owner, seconds)


async def found_in(table: SearchTable, name: str = "a") -> Any:
    return await table.get(name)


async def run_in(table: RunTable, name: str = "run") -> Any:
    return await table.get(name)


def a_plan(name: str, value: float = 3.0, problem: str = "problem", **changes: Any) -> NewPlan:
    """A plan with an objective and a problem's key; ``changes`` are of its summary."""
    values: dict[str, Any] = {
        **{"plan_id": name, "pp_degree": 2, "microbatches": 4, "placement": "v", "objective": "span"},
        **{
            "value": value,
            "lower_bound": 2.0,
            "gap": value / 2 - 1,
            "status": "feasible",
            "bubble_rate": 0.1,
        },
        **{"method": "fake", "time_unit": "us", "created_at": datetime.now(UTC)},
    }
    summary = PlanSummaryDocument(**{**values, **changes})
    return NewPlan(summary, b"document", problem, summary.lower_bound)


PLAN = "f" * 64


def a_beat(
    agent_id: str, port: int | None = None, run_id: str | None = None, places: Iterable[dict[str, Any]] = ()
) -> tuple[str, Heartbeat]:
    """A heartbeat of an agent with the places of its ranks; ids may be short."""
    ranks = [RankPlace(**place) for place in places]
    return agent_id, Heartbeat.model_construct(port=port, run_id=run_id, ranks=ranks)


def an_agent(name: str, /, **changes: Any) -> tuple[AgentRequest, str]:
    """An agent for one rank that allows every model, and its owner; ids may be short."""
    owner = changes.pop("owner", "t")
    values: dict[str, Any] = {
        **{"id": name, "name": name, "address": "127.0.0.1", "port": 1000, "slots": 1},
        **{"devices": [], "versions": {}, "allows": AllowsDocument(models=["*"])},
    }
    return AgentRequest.model_construct(**{**values, **changes}), owner


def a_run(name: str, /, nodes: int = 1, **changes: Any) -> NewRun:
    """A run of plan :data:`PLAN` with one rank on each node."""
    values: dict[str, Any] = {
        **{"id": name, "plan_id": PLAN, "search_id": None, "nodes": nodes, "ranks_per_node": 1, "steps": 5},
        "model": {"factory": "a.b:c", "arguments": {}, "seed": 0},
        **{"options": {}, "created_at": datetime.now(UTC)},
    }
    return NewRun(**{**values, **changes})


async def begin(
    database: Database, run_id: str, nodes: int, agent: dict[str, Any] | None = None, **changes: Any
) -> list[str]:
    """Register agents and start a run of all of them; the ids of the agents, by node rank."""
    await PlanTable(database).add(a_plan(PLAN))
    agents, runs = AgentTable(database), RunTable(database)
    for index in range(nodes):
        await agents.add(*an_agent(f"{run_id}-{index}", **agent or {}))
    await runs.add(a_run(run_id, nodes, **changes))
    assert await runs.assign(decide) == [run_id]
    return [node.agent_id for node in (await run_in(runs, run_id)).members]


@dataclass
class Counts:
    """What a database was asked: statements, and rows that became objects, by the name of their class."""

    texts: list[str] = field(default_factory=list)
    loaded: Counter[str] = field(default_factory=Counter)

    @property
    def statements(self) -> int:
        return len(self.texts)

    @property
    def nodes(self) -> int:
        return self.loaded["NodeRow"]


@contextmanager
def counting() -> Iterator[Counts]:
    """Count while the block runs."""
    found = Counts()

    def executed(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement != "BEGIN":
            found.texts.append(statement)

    def loaded(row: object, _: object) -> None:
        found.loaded[type(row).__name__] += 1

    event.listen(Engine, "before_cursor_execute", executed)
    event.listen(Base, "load", loaded, propagate=True)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", executed)
        event.remove(Base, "load", loaded)
