"""Runs: what the database stores of them, and what the API sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

from zbv_service.errors import StoredError
from zbv_service.records.run_options import ModelDocument, RunOptionsDocument, ScriptDocument
from zbv_service.records.shared import NEXT, Record, json_with

RunState = Literal["planning", "waiting", "starting", "running", "succeeded", "failed", "cancelled"]
NodeState = Literal["assigned", "running", "ended"]
NodeOutcome = Literal["succeeded", "failed", "stopped"]
FailureKind = Literal["refused", "invalid", "agent-lost", "killed", "error", "launch", "peer"]
RUN_STATES: tuple[str, ...] = get_args(RunState)

RUN_ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""States that never change again."""
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)
"""Ordered from cause to consequence: the first of a run's failures in this order explains the others."""
FINAL_FAILURES: frozenset[str] = frozenset({"invalid"})
"""Failures that a retry would repeat, because the input is wrong. Other agents may accept a refused run."""

PartKind = Literal["trace", "log"]
"""The artifacts of a rank."""


class OfferDocument(Record):
    """A plan that is better for the measured costs."""

    plan_id: str
    objective_now: float
    """Objective of the run's plan for the measured costs."""
    objective_then: float
    """Objective of the offered plan for the same costs."""


class Replanning(Record):
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


class NodeDocument(Record):
    """One node of a run, and the places of its ranks."""

    node_rank: int
    agent_id: str
    agent: str = Field(validation_alias="agent_name")
    """The agent's name."""
    state: NodeState
    outcome: NodeOutcome | None
    ranks: list[dict[str, Any]]
    """rank, step and action, as last reported."""


class CauseDocument(Record):
    """The first cause of a failed generation, kept even if a later generation succeeds."""

    generation: int
    at: datetime
    kind: FailureKind
    node_rank: int | None
    agent: str | None
    """Name of the node's agent."""
    rank: int | None
    """null if the node failed as a whole."""
    step: int | None
    """The step in which the rank failed, as reported by it or its agent."""
    action: str | None
    peer: int | None
    """The rank that this rank waited for."""
    last_step: int | None
    """The step of the last heartbeat, which may lag behind."""
    last_action: str | None
    message: str
    consequences: int
    """Number of other failures in the same generation."""


class RefusalDocument(Record):
    """An agent that refused a run; the run is not assigned to it again."""

    generation: int
    at: datetime
    agent_id: str
    agent: str
    message: str


class NewRun(Record):
    """A run as it is accepted. It has either a plan or a search, and either a model and steps or a script."""

    id: str
    name: str | None = None
    """As the request gave it."""
    plan_id: str | None
    """null while its search runs."""
    search_id: str | None
    """The search for its plan, if it was submitted as a problem."""
    model: ModelDocument | None
    """null for a run of a script."""
    script: ScriptDocument | None = None
    nodes: int
    ranks_per_node: int
    steps: int | None
    """null for a run of a script."""
    options: RunOptionsDocument
    created_at: datetime
    created_by: str | None = Field(None, exclude=True)
    """Name of the token that submitted it; None without authentication."""

    @property
    def program(self) -> str:
        """The factory of its model, or the path of its script."""
        return self.model.factory if self.model else self.script.path if self.script else ""


@dataclass(frozen=True)
class RequestKey:
    """The Idempotency-Key of a request for a run."""

    hash: str
    """Hash of the caller and the key."""
    fingerprint: str
    """Hash of the body, which must be the same whenever the key is."""


class RunDocument(NewRun):
    """A training run in any state."""

    state: RunState
    target_plan_id: str | None
    """The plan that it changes to at its next step."""
    offer: OfferDocument | None
    """Accept it with POST /v1/runs/{id}/plan."""
    replanning: dict[str, Any] | None = Field(exclude=True)
    """The fields of :class:`Replanning`, whose schema the API does not need."""
    generation: int
    """Number of restarts, from 0."""
    stop_requested: bool = Field(exclude=True)
    """Whether its nodes are being stopped, for any reason."""
    cancel_requested: bool
    members: list[NodeDocument]
    """The nodes of this generation, by node rank."""
    error: StoredError | None = None
    """Why it failed; `failures` has the first 100 reports of the last generation's ranks, the events all of
    all generations."""
    failures: list[CauseDocument]
    """The cause of each failed generation, oldest first."""
    refusals: list[RefusalDocument]
    waits_for: str | None
    """What a waiting run lacks, as text."""
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None

    def text(self) -> bytes:
        """The document as JSON, written node by node, because it may have thousands of ranks."""
        document = self.model_dump(mode="json", exclude={"members"})
        return json_with(document, members=[node.text() for node in self.members])


class RunList(BaseModel):
    """A page of runs, newest first."""

    runs: list[RunDocument]
    next: str | None = NEXT


class EventDocument(Record):
    """An event of a run."""

    id: int
    at: datetime
    kind: str
    detail: str
    run_id: str = Field(exclude=True)

    @property
    def owner(self) -> str:
        """The run."""
        return self.run_id

    @property
    def number(self) -> int:
        """The id; ids increase."""
        return self.id


class EventList(BaseModel):
    """Events of a run, oldest first; pass the last id as ``after`` to get the next ones."""

    events: list[EventDocument]


class StepDocument(Record):
    """A step of a run."""

    step: int
    seconds: float
    """Of the slowest rank, from its first action to its last."""
    loss: float | None
    """null if it is unknown or not finite."""


class StepList(BaseModel):
    """Steps of a run, ascending: the first and the newest ones, and of long runs evenly some between them."""

    steps: list[StepDocument]


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
    generation: int = 0
    waits_for: str | None = field(default=None, compare=False)
    """What it lacked in the last pass, as text."""


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
