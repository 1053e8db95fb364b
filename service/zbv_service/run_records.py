"""Agents and runs as plain frozen records: what goes into the database and comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

AgentState = Literal["live", "draining", "left", "lost"]
RunState = Literal["waiting", "starting", "running", "succeeded", "failed", "cancelled"]
NodeState = Literal["assigned", "running", "ended"]
NodeOutcome = Literal["succeeded", "failed", "stopped"]
FailureKind = Literal["refused", "agent-lost", "killed", "error", "launch", "peer"]

RUN_ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""States that never change again."""
AGENT_ENDED: frozenset[str] = frozenset({"left", "lost"})
"""States that an agent leaves only by registering anew."""
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)
"""From cause to consequence: of a run's failures, the first in this order explains the others."""


@dataclass(frozen=True)
class NewAgent:
    """An agent as it registers.

    Attributes
    ----------
    id
        Chosen by the agent, so that a repeated registration is the same agent.
    address, port
        Where the ranks of a run meet when this node is its first.
    slots
        Ranks that the node takes at the same time.
    allowed_models
        Patterns of what the node may load; the node itself enforces them.
    """

    id: str
    name: str
    address: str
    port: int
    slots: int
    devices: list[str]
    versions: dict[str, str]
    allowed_models: list[str]


@dataclass(frozen=True)
class AgentRecord(NewAgent):
    """A registered agent; ``run_id`` is the run that holds it, ``seen_at`` its last sign of life."""

    state: AgentState
    run_id: str | None
    created_at: datetime
    seen_at: datetime


@dataclass(frozen=True)
class NewRun:
    """A run as it is accepted.

    Attributes
    ----------
    model
        ``factory``, ``arguments`` and ``seed``.
    nodes, ranks_per_node
        Their product is the plan's number of ranks.
    options
        ``backend``, ``timeout`` and ``threads``.
    """

    id: str
    plan_id: str
    model: dict[str, Any]
    nodes: int
    ranks_per_node: int
    steps: int
    options: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True)
class NodeRecord:
    """One node's part in a generation of a run.

    Attributes
    ----------
    ranks
        The last known ``rank``, ``step`` and ``action`` of each of its ranks.
    """

    run_id: str
    generation: int
    node_rank: int
    agent_id: str
    agent_name: str
    rendezvous: str
    state: NodeState
    outcome: NodeOutcome | None
    ranks: list[dict[str, Any]]


@dataclass(frozen=True)
class RunRecord(NewRun):
    """A run; ``stop_requested`` says that its nodes are being stopped, whatever for."""

    state: RunState
    generation: int
    stop_requested: bool
    cancel_requested: bool
    error: dict[str, Any] | None
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    members: tuple[NodeRecord, ...] = ()


@dataclass(frozen=True)
class Work:
    """What one agent is to do: its node of a generation of a run."""

    run: RunRecord
    node: NodeRecord


@dataclass(frozen=True)
class EventRecord:
    """Something that happened to a run; ids grow."""

    id: int
    at: datetime
    kind: str
    detail: str


@dataclass(frozen=True)
class NodeReport:
    """How a node's part of a generation ended; ``failures`` are documents of its ranks' failures."""

    run_id: str
    generation: int
    outcome: NodeOutcome
    failures: list[dict[str, Any]]
