"""Agents and runs as plain frozen records: what goes into the database and comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

AgentState = Literal["live", "draining", "left", "lost"]
RunState = Literal["planning", "waiting", "starting", "running", "succeeded", "failed", "cancelled"]
NodeState = Literal["assigned", "running", "ended"]
NodeOutcome = Literal["succeeded", "failed", "stopped"]
FailureKind = Literal["refused", "invalid", "agent-lost", "killed", "error", "launch", "peer"]
AGENT_STATES: tuple[str, ...] = get_args(AgentState)
RUN_STATES: tuple[str, ...] = get_args(RunState)

RUN_ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""States that never change again."""
AGENT_PRESENT: frozenset[str] = frozenset({"live", "draining"})
"""States of agents that are there."""
AGENT_ENDED: frozenset[str] = frozenset({"left", "lost"})
"""States that an agent leaves only by registering anew."""
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)
"""From cause to consequence: of a run's failures, the first in this order explains the others."""
FINAL_FAILURES: frozenset[str] = frozenset({"invalid"})
"""Failures that trying again would only repeat: the input is wrong. Other agents may take a refused run."""
DEFAULT_RETRIES = 3

StopCause = Literal["cancelled", "failed", "unknown-run"]
"""Why an agent is to end its ranks."""
PartKind = Literal["trace", "log"]
"""What a rank leaves behind."""


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
    allowed_models, checkpoint_directories
        Patterns of what the node may load, and where its ranks may write checkpoints, None when it does not
        say; the node itself enforces both.
    owner
        The token that registers it, see :attr:`zbv_service.security.grants.Grant.owner`; None of agents that
        were registered before owners were stored.
    """

    id: str
    name: str
    address: str
    port: int
    slots: int
    devices: list[str]
    versions: dict[str, str]
    allowed_models: list[str]
    checkpoint_directories: list[str] | None = field(default=None, kw_only=True)
    owner: str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class AgentRecord(NewAgent):
    """A registered agent; ``run_id`` is the run that holds it, ``seen_at`` its last sign of life."""

    state: AgentState
    run_id: str | None
    created_at: datetime
    seen_at: datetime


@dataclass(frozen=True)
class Beat:
    """A sign of life of an agent.

    Attributes
    ----------
    port
        That is free there now; None leaves it as it was.
    run_id, ranks
        The run that it works on, and the ``rank``, ``step`` and ``action`` of each of its ranks there.
    """

    agent_id: str
    port: int | None = None
    run_id: str | None = None
    ranks: tuple[dict[str, Any], ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether every one of its ranks has begun a step."""
        return bool(self.ranks) and all(place["step"] is not None for place in self.ranks)


@dataclass(frozen=True)
class RunOrders:
    """What a run wants of its agents; as :class:`RunRecord` has it."""

    cancel_requested: bool
    stop_requested: bool
    target_plan_id: str | None


@dataclass(frozen=True)
class BeatAnswer:
    """What an agent gets to hear: its own state, None when it is unknown, and its run's orders, if any."""

    name: str
    state: AgentState | None
    orders: RunOrders | None


@dataclass(frozen=True)
class NewRun:
    """A run as it is accepted.

    Attributes
    ----------
    plan_id
        None until the search ``search_id`` has found it. Of a plan and a search, a new run has one.
    search_options
        Of that search, and of later ones for measured costs; None leaves the defaults.
    model
        ``factory``, ``arguments`` and ``seed``.
    nodes, ranks_per_node
        Their product is the number of ranks of all replicas.
    options
        As :class:`zbv_service.runs.options.RunOptionsDocument` has them.
    created_by
        Name of the token that asked for it; None where nobody has to say who they are.
    """

    id: str
    plan_id: str | None
    search_id: str | None
    search_options: dict[str, Any] | None
    model: dict[str, Any]
    nodes: int
    ranks_per_node: int
    steps: int
    options: dict[str, Any]
    created_at: datetime
    created_by: str | None = field(default=None, kw_only=True)


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
    """A run.

    Attributes
    ----------
    generation
        How often it was begun anew.
    stop_requested
        Its nodes are being stopped, whatever for.
    target_plan_id
        What it is to change over to, None when nothing is.
    offer
        A plan that is better under the measured costs: ``plan_id``, ``objective_now``, ``objective_then``.
    replanning
        What the service remembers of its looks at the measured costs; see :class:`Replanning`.
    failures
        The cause of every generation that failed, the oldest first; they stay when a later one succeeds.
    refusals
        Agents that refused the run, which does not get them again.
    waits_for
        What a waiting run lacks, for people; None before it was looked at, and in every other state.
    """

    state: RunState
    generation: int
    stop_requested: bool
    cancel_requested: bool
    target_plan_id: str | None
    offer: dict[str, Any] | None
    replanning: dict[str, Any] | None
    error: dict[str, Any] | None
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    members: tuple[NodeRecord, ...] = ()
    failures: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    waits_for: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs a list shows; None and nothing let everything through.

    Attributes
    ----------
    text
        How the id of the run, its plan or its search begins, or a part of the model's factory.
    """

    states: frozenset[str] = frozenset()
    text: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class AgentFilter:
    """Which agents a list shows: those that are there, unless ``states`` says otherwise.

    Attributes
    ----------
    text
        A part of the name or the address, or how the id of the agent or of its run begins.
    """

    states: frozenset[str] = AGENT_PRESENT
    text: str | None = None


@dataclass(frozen=True)
class Work:
    """What one agent is to do: its node of a generation of a run."""

    run: RunRecord
    node: NodeRecord


@dataclass(frozen=True)
class NewPart:
    """A rank's trace or log, packed.

    Attributes
    ----------
    plan_id, pp_rank, replica, last_step
        Of a trace: the plan that was measured, the rank's place in it, and the newest step.
    """

    run_id: str
    generation: int
    rank: int
    kind: PartKind
    body: bytes
    plan_id: str | None = None
    pp_rank: int | None = None
    replica: int | None = None
    last_step: int | None = None


@dataclass(frozen=True)
class PartInfo:
    """What is known of a part without reading it; as :class:`NewPart`."""

    generation: int
    rank: int
    kind: PartKind
    plan_id: str | None
    pp_rank: int | None
    replica: int | None
    last_step: int | None
    updated_at: datetime


@dataclass(frozen=True)
class Replanning:
    """What is remembered of looks at a run's measured costs.

    Attributes
    ----------
    plan_id, generation, step
        Where the last look was: only later steps of the same plan and generation are new.
    search_id
        The last search of a measured problem for this plan, None before the first.
    is_open
        Whether that search's answer is still to be looked at.
    searches
        Of measured problems of this run, for whatever plan.
    """

    plan_id: str
    generation: int
    step: int
    search_id: str | None = None
    is_open: bool = False
    searches: int = 0


def place_of(failure: Mapping[str, Any]) -> str:
    """Where a failure happened, for people: rank, step, action and peer, as far as they are known.

    A step that only a heartbeat reported may lag behind, and is called so.
    """
    step, last = failure.get("step"), failure.get("last_step")
    action = failure.get("action") or (failure.get("last_action") if step is None else None)
    told = (
        None if failure.get("rank") is None else f"rank {failure['rank']}",
        f"step {step}" if step is not None else None if last is None else f"last reported step {last}",
        action and f"at {action}",
        None if failure.get("peer") is None else f"waiting for rank {failure['peer']}",
    )
    return ", ".join(text for text in told if text)


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


@dataclass(frozen=True)
class WaitingRun:
    """What a waiting run needs to start: ``nodes`` agents with ``ranks_per_node`` slots each.

    Attributes
    ----------
    checkpoint_directory
        None if the run saves no checkpoints.
    refused_by
        Ids of agents that refused this run; it is not assigned to them again.
    """

    run_id: str
    nodes: int
    ranks_per_node: int
    factory: str
    checkpoint_directory: str | None = None
    refused_by: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AvailableAgent:
    """A live agent.

    Attributes
    ----------
    owner
        The token that registered it.
    checkpoint_directories
        As in :func:`zbv_service.client.admission.is_run_allowed`; None if the agent did not say.
    """

    agent_id: str
    slots: int
    is_idle: bool
    allowed_models: tuple[str, ...]
    owner: str | None = None
    checkpoint_directories: tuple[str, ...] | None = None
