"""Agents and runs, as they enter and leave the database."""

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
"""States of agents that can work."""
AGENT_ENDED: frozenset[str] = frozenset({"left", "lost"})
"""States that an agent leaves only by registering again."""
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)
"""Ordered from cause to consequence: the first of a run's failures in this order explains the others."""
FINAL_FAILURES: frozenset[str] = frozenset({"invalid"})
"""Failures that a retry would repeat, because the input is wrong. Other agents may accept a refused run."""
DEFAULT_RETRIES = 3

StopCause = Literal["cancelled", "failed", "unknown-run"]
"""Why an agent must end its ranks."""
PartKind = Literal["trace", "log"]
"""The artifacts of a rank."""


@dataclass(frozen=True)
class NewAgent:
    """An agent as it registers."""

    id: str
    """Chosen by the agent, so that a repeated registration adds no second agent."""
    name: str
    address: str
    port: int
    """The rendezvous of a run with this agent as its first node."""
    slots: int
    """The most ranks of the node at the same time."""
    devices: list[str]
    versions: dict[str, str]
    allowed_models: list[str]
    allowed_scripts: list[str] = field(default_factory=list, kw_only=True)
    checkpoint_directories: list[str] | None = field(default=None, kw_only=True)
    """Patterns of models that the node may load and of scripts that it may run, and directories for
    checkpoints (None if the agent did not report any). The node itself enforces them."""
    owner: str = field(kw_only=True)
    """The token that registered it (:attr:`zbv_service.security.grants.Grant.owner`)."""


@dataclass(frozen=True)
class AgentRecord(NewAgent):
    """A registered agent: ``run_id`` is the run that it is assigned to, ``seen_at`` its last heartbeat."""

    state: AgentState
    run_id: str | None
    created_at: datetime
    seen_at: datetime


@dataclass(frozen=True)
class Beat:
    """A heartbeat of an agent."""

    agent_id: str
    port: int | None = None
    """A free port of its node; None leaves the stored one."""
    run_id: str | None = None
    ranks: tuple[dict[str, Any], ...] = ()
    """The run that it works on, and the ``rank``, ``step`` and ``action`` of each of its ranks."""

    def is_running(self, *, is_script: bool) -> bool:
        """Whether all of its ranks have begun a step, or a script, which need not have steps."""
        return bool(self.ranks) and (is_script or all(place["step"] is not None for place in self.ranks))


@dataclass(frozen=True)
class RunOrders:
    """The part of a :class:`RunRecord` that its agents act on."""

    cancel_requested: bool
    stop_requested: bool
    target_plan_id: str | None


@dataclass(frozen=True)
class BeatAnswer:
    """The answer to a heartbeat: the agent's state (None if it is unknown) and the orders of its run."""

    name: str
    state: AgentState | None
    orders: RunOrders | None


@dataclass(frozen=True)
class NewRun:
    """A run as it is accepted."""

    id: str
    plan_id: str | None
    """None until the search ``search_id`` has found it. A new run has either a plan or a search."""
    search_id: str | None
    search_options: bytes | None
    """Options of that search and of later searches for measured costs, packed; None for the defaults, and
    in records that are read."""
    model: dict[str, Any] | None
    """``factory``, ``arguments`` and ``seed``; None for a run of a script."""
    nodes: int
    ranks_per_node: int
    """Their product is the number of ranks of all replicas."""
    steps: int | None
    """None for a run of a script."""
    options: dict[str, Any]
    """The fields of :class:`zbv_service.runs.options.RunOptionsDocument`."""
    created_at: datetime
    created_by: str | None = field(default=None, kw_only=True)
    """Name of the token that submitted it; None without authentication."""
    script: dict[str, Any] | None = field(default=None, kw_only=True)
    """``path`` and ``arguments``; None for a run of a model."""

    @property
    def program(self) -> str:
        """The factory of its model, or the path of its script."""
        return str(self.model["factory"] if self.model else (self.script or {})["path"])


@dataclass(frozen=True)
class RequestKey:
    """The Idempotency-Key of a request for a run."""

    hash: str
    """Hash of the caller and the key."""
    fingerprint: str
    """Hash of the body, which must be the same whenever the key is."""


@dataclass(frozen=True)
class NodeRecord:
    """One node's part in a generation of a run."""

    run_id: str
    generation: int
    node_rank: int
    agent_id: str
    agent_name: str
    rendezvous: str
    state: NodeState
    outcome: NodeOutcome | None
    ranks: list[dict[str, Any]]
    """The last known ``rank``, ``step`` and ``action`` of each of its ranks."""


@dataclass(frozen=True)
class RunRecord(NewRun):
    """A run."""

    state: RunState
    generation: int
    """The number of restarts."""
    stop_requested: bool
    """Whether its nodes are being stopped, for any reason."""
    cancel_requested: bool
    target_plan_id: str | None
    """The plan that it will change to; None without a pending change."""
    offer: dict[str, Any] | None
    """A plan that is better under the measured costs: ``plan_id``, ``objective_now``, ``objective_then``."""
    replanning: dict[str, Any] | None
    """The fields of :class:`Replanning`."""
    error: dict[str, Any] | None
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    members: tuple[NodeRecord, ...] = ()
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The cause of every generation that failed, oldest first, even if a later generation succeeds."""
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """Agents that refused the run. They are not assigned to it again."""
    waits_for: str | None = None
    """What a waiting run lacks, as text; None before the first check, and in any other state."""


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs a list shows; empty fields do not restrict it."""

    states: frozenset[str] = frozenset()
    text: str | None = None
    """The beginning of the id of the run, its plan or its search, or a part of the model's factory or the
    script's path."""
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class AgentFilter:
    """Which agents a list shows; by default those that can work."""

    states: frozenset[str] = AGENT_PRESENT
    text: str | None = None
    """A part of the name or the address, or the beginning of the id of the agent or its run."""


@dataclass(frozen=True)
class Work:
    """The work of one agent: its node in a generation of a run."""

    run: RunRecord
    node: NodeRecord


@dataclass(frozen=True)
class NewPart:
    """A rank's trace or log, packed."""

    run_id: str
    generation: int
    rank: int
    kind: PartKind
    body: bytes
    plan_id: str | None = None
    pp_rank: int | None = None
    replica: int | None = None
    last_step: int | None = None
    """For a trace: the measured plan, the place of the rank in it, and the newest step."""


@dataclass(frozen=True)
class PartInfo:
    """A part without its content; see :class:`NewPart`."""

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
    """The state of replanning a run for its measured costs."""

    plan_id: str
    generation: int
    step: int
    """The last steps that were examined; only later steps of the same plan and generation are new."""
    search_id: str | None = None
    """The last search with measured costs for this plan; None before the first."""
    is_open: bool = False
    """Whether the result of that search has not been handled yet."""
    searches: int = 0
    """The number of searches with measured costs in this run, for any plan."""


def place_of(failure: Mapping[str, Any]) -> str:
    """Where a failure happened, as text: rank, step, action and peer, as far as they are known.

    A step from a heartbeat may lag behind, so the text says that it was reported.
    """
    step, last = failure.get("step"), failure.get("last_step")
    action = failure.get("action") or (failure.get("last_action") if step is None else None)
    known = (
        None if failure.get("rank") is None else f"rank {failure['rank']}",
        f"step {step}" if step is not None else None if last is None else f"last reported step {last}",
        action and f"at {action}",
        None if failure.get("peer") is None else f"waiting for rank {failure['peer']}",
    )
    return ", ".join(text for text in known if text)


@dataclass(frozen=True)
class EventRecord:
    """An event of a run; ids increase."""

    id: int
    at: datetime
    kind: str
    detail: str
    run_id: str

    @property
    def owner(self) -> str:
        """The run."""
        return self.run_id

    @property
    def number(self) -> int:
        """The id."""
        return self.id


@dataclass(frozen=True)
class NodeReport:
    """How a node ended in a generation; ``failures`` are the failure documents of its ranks."""

    run_id: str
    generation: int
    outcome: NodeOutcome
    failures: list[dict[str, Any]]


@dataclass(frozen=True)
class WaitingRun:
    """The agents that a waiting run needs: ``nodes`` agents with ``ranks_per_node`` slots each."""

    run_id: str
    nodes: int
    ranks_per_node: int
    factory: str | None
    script: str | None = field(default=None, kw_only=True)
    """The run's model, or the path of its script."""
    checkpoint_directory: str | None = None
    """None if the run saves no checkpoints."""
    refused_by: frozenset[str] = frozenset()
    """Ids of agents that refused this run; it is not assigned to them again."""


@dataclass(frozen=True)
class AvailableAgent:
    """A live agent."""

    agent_id: str
    slots: int
    is_idle: bool
    allowed_models: tuple[str, ...]
    owner: str = ""
    """The token that registered it."""
    checkpoint_directories: tuple[str, ...] | None = None
    """As in :func:`zbv_service.client.admission.is_directory_allowed`; None if the agent did not say."""
    allowed_scripts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Which waiting runs get which agents (:func:`zbv_service.runs.scheduler.decide`)."""

    placed: dict[str, list[str]]
    """Agent ids for the runs that can start now, by run id."""
    lacking: dict[str, str]
    """For every other run, a sentence that says what it needs, and why the present agents are not enough."""
