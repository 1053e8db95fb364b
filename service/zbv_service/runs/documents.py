"""Runs as they enter and leave over HTTP, as pydantic models: named schemas of the API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from zbv_service.documents.problems import QuestionDocument
from zbv_service.documents.shared import NEXT, PREVIOUS, OptionsDocument, RequestDocument
from zbv_service.errors import ProblemDetails
from zbv_service.records.runs import (
    EventRecord,
    FailureKind,
    NodeOutcome,
    NodeRecord,
    NodeState,
    RunRecord,
    RunState,
)
from zbv_service.runs.options import MAX_INTEGER, RunOptionsDocument

MAX_NODES = 4096

PlanId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelDocument(RequestDocument):
    """Which model to train: all nodes must have it, and allow it."""

    factory: Annotated[str, Field(max_length=300, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = Field(
        description="package.module:factory"
    )
    arguments: dict[str, Any] = Field({}, description="Keyword arguments of the factory.")
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)] = 0


class RunRequest(RequestDocument):
    """A plan to be run, or a problem whose plan is to be searched and run: exactly one of the two."""

    plan_id: PlanId | None = None
    problem: QuestionDocument | None = None
    search_options: OptionsDocument | None = Field(
        None, description="Of the search for the problem's plan, and of those that measured costs call for."
    )
    model: ModelDocument
    nodes: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)] = Field(
        description="Agents; the ranks of all replicas are spread evenly over them."
    )
    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]
    options: RunOptionsDocument = RunOptionsDocument()


class PlanChange(RequestDocument):
    """The plan that a run is to change over to."""

    plan_id: PlanId


class OfferDocument(BaseModel):
    """A plan that is better under the costs that were measured."""

    plan_id: str
    objective_now: float = Field(description="Of the run's plan under the measured costs.")
    objective_then: float = Field(description="Of the offered plan under the same costs.")


class NodeDocument(BaseModel):
    """One node of a run, and where its ranks are."""

    node_rank: int
    agent_id: str
    agent: str = Field(description="The agent's name.")
    state: NodeState
    outcome: NodeOutcome | None
    ranks: list[dict[str, Any]] = Field(description="rank, step and action, as last heard of.")

    @classmethod
    def of(cls, record: NodeRecord) -> NodeDocument:
        """The document of a stored node."""
        return cls(
            node_rank=record.node_rank,
            agent_id=record.agent_id,
            agent=record.agent_name,
            state=record.state,
            outcome=record.outcome,
            ranks=record.ranks,
        )


class CauseDocument(BaseModel):
    """Why a generation of a run failed: the first cause, kept also when a later generation succeeds."""

    generation: int
    at: datetime
    kind: FailureKind
    node_rank: int | None
    agent: str | None = Field(description="Name of the node's agent.")
    rank: int | None = Field(description="null when the node failed as a whole.")
    step: int | None = Field(description="Where the rank failed, as it or its agent said.")
    action: str | None
    peer: int | None = Field(description="The rank that it waited for.")
    last_step: int | None = Field(description="What the last heartbeat reported; it may lag behind.")
    last_action: str | None
    message: str
    consequences: int = Field(description="Failures of the same generation that came with it.")


class RefusalDocument(BaseModel):
    """An agent that refused a run, which is not given to it again."""

    generation: int
    at: datetime
    agent_id: str
    agent: str
    message: str


class RunDocument(BaseModel):
    """A run, waiting, under way or ended."""

    id: str
    state: RunState
    plan_id: str | None = Field(description="null while it is searched.")
    search_id: str | None = Field(description="The search for its plan, where it was submitted as a problem.")
    target_plan_id: str | None = Field(description="The plan that it changes over to at its next step.")
    offer: OfferDocument | None = Field(description="Take it with POST /v1/runs/{id}/plan.")
    model: ModelDocument
    nodes: int
    ranks_per_node: int
    steps: int
    options: RunOptionsDocument
    generation: int = Field(description="Counts how often the run was begun anew, from 0.")
    cancel_requested: bool
    members: list[NodeDocument] = Field(description="The nodes of this generation, by node rank.")
    error: ProblemDetails | None = Field(
        None,
        description="Why it failed; failures has every rank's story of the last generation, the events have "
        "those of all.",
    )
    failures: list[CauseDocument] = Field(
        description="The cause of every generation that failed, the oldest first."
    )
    refusals: list[RefusalDocument]
    waits_for: str | None = Field(description="What a waiting run lacks, for people.")
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None

    @classmethod
    def of(cls, record: RunRecord) -> RunDocument:
        """The document of a stored run."""
        made = ("model", "options", "members", "error", "offer", "failures", "refusals")
        return cls(
            **{name: getattr(record, name) for name in cls.model_fields if name not in made},
            offer=None if record.offer is None else OfferDocument.model_validate(record.offer),
            model=ModelDocument.model_validate(record.model),
            options=RunOptionsDocument.model_validate(record.options),
            members=[NodeDocument.of(node) for node in record.members],
            failures=[CauseDocument.model_validate(cause) for cause in record.failures],
            refusals=[RefusalDocument.model_validate(refusal) for refusal in record.refusals],
            error=None if record.error is None else ProblemDetails.model_validate(record.error),
        )


class RunList(BaseModel):
    """Some of the runs, the newest first."""

    runs: list[RunDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS


class EventDocument(BaseModel):
    """Something that happened to a run."""

    id: int
    at: datetime
    kind: str
    detail: str

    @classmethod
    def of(cls, record: EventRecord) -> EventDocument:
        """The document of a stored event."""
        return cls(id=record.id, at=record.at, kind=record.kind, detail=record.detail)


class EventList(BaseModel):
    """What happened to a run, the oldest first; ask again with ``after`` set to the last id."""

    events: list[EventDocument]
