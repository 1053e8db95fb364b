"""JSON documents of runs, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from zbv_service.documents.problems import QuestionDocument
from zbv_service.documents.shared import NEXT, PREVIOUS, OptionsDocument, RequestDocument
from zbv_service.errors import ErrorDetails
from zbv_service.records.runs import FailureKind, NodeOutcome, NodeState, RunState
from zbv_service.runs.options import MAX_INTEGER, RunOptionsDocument

MAX_NODES = 4096

PlanId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_SCRIPT = r"^/[^\x00-\x1f\x7f]*$"
_FACTORY = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|transformers:/[^\s:]+)$"


class RecordDocument(BaseModel):
    """Base of documents that are made from the attributes of a stored record."""

    model_config = ConfigDict(from_attributes=True)


class ModelDocument(RequestDocument):
    """The model to train; all nodes must have it and allow it."""

    factory: Annotated[str, Field(max_length=300, pattern=_FACTORY)] = Field(
        description="package.module:factory, or transformers:PATH of a folder on the nodes"
    )
    arguments: dict[str, Any] = Field({}, description="Keyword arguments of the factory.")
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)] = 0


class ScriptDocument(RequestDocument):
    """A Python script that each rank runs; all nodes must have it and allow it."""

    path: Annotated[str, Field(max_length=1000, pattern=_SCRIPT)] = Field(
        description="The absolute path of the script on every node, such as /shared/train.py."
    )
    arguments: Annotated[list[str], Field(max_length=1000)] = Field(
        [], description="Command-line arguments. Everyone who may read the run can read them."
    )


class RunRequest(RequestDocument):
    """A plan to run, or a problem to search a plan for and run it: exactly one of the two.

    What runs is exactly one of ``model`` and ``script``.
    """

    plan_id: PlanId | None = None
    problem: QuestionDocument | None = None
    search_options: OptionsDocument | None = Field(
        None, description="Options of the search for the plan, and of searches for measured costs."
    )
    model: ModelDocument | None = Field(None, description="A model that zbv trains.")
    script: ScriptDocument | None = Field(
        None, description="A script that trains by itself; see the options that have an effect on it."
    )
    nodes: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)] = Field(
        description="Number of agents; the ranks of all replicas are spread evenly over them."
    )
    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)] | None = Field(
        None, description="Required with model; a script decides by itself when it ends."
    )
    options: RunOptionsDocument = RunOptionsDocument()


class PlanChange(RequestDocument):
    """The plan that a run should change to."""

    plan_id: PlanId


class OfferDocument(BaseModel):
    """A plan that is better for the measured costs."""

    plan_id: str
    objective_now: float = Field(description="Objective of the run's plan for the measured costs.")
    objective_then: float = Field(description="Objective of the offered plan for the same costs.")


class NodeDocument(RecordDocument):
    """One node of a run, and the places of its ranks."""

    node_rank: int
    agent_id: str
    agent: str = Field(validation_alias="agent_name", description="The agent's name.")
    state: NodeState
    outcome: NodeOutcome | None
    ranks: list[dict[str, Any]] = Field(description="rank, step and action, as last reported.")


class CauseDocument(BaseModel):
    """The first cause of a failed generation, kept even if a later generation succeeds."""

    generation: int
    at: datetime
    kind: FailureKind
    node_rank: int | None
    agent: str | None = Field(description="Name of the node's agent.")
    rank: int | None = Field(description="null if the node failed as a whole.")
    step: int | None = Field(description="The step in which the rank failed, as reported by it or its agent.")
    action: str | None
    peer: int | None = Field(description="The rank that this rank waited for.")
    last_step: int | None = Field(description="The step of the last heartbeat, which may lag behind.")
    last_action: str | None
    message: str
    consequences: int = Field(description="Number of other failures in the same generation.")


class RefusalDocument(BaseModel):
    """An agent that refused a run; the run is not assigned to it again."""

    generation: int
    at: datetime
    agent_id: str
    agent: str
    message: str


class RunDocument(RecordDocument):
    """A training run in any state."""

    id: str
    state: RunState
    plan_id: str | None = Field(description="null while its search runs.")
    search_id: str | None = Field(description="The search for its plan, if it was submitted as a problem.")
    target_plan_id: str | None = Field(description="The plan that it changes to at its next step.")
    offer: OfferDocument | None = Field(description="Accept it with POST /v1/runs/{id}/plan.")
    model: ModelDocument | None = Field(description="null for a run of a script.")
    script: ScriptDocument | None = None
    nodes: int
    ranks_per_node: int
    steps: int | None = Field(description="null for a run of a script.")
    options: RunOptionsDocument
    generation: int = Field(description="Number of restarts, from 0.")
    cancel_requested: bool
    members: list[NodeDocument] = Field(description="The nodes of this generation, by node rank.")
    error: ErrorDetails | None = Field(
        None,
        description="Why it failed; `failures` has the first 100 reports of the last generation's ranks, the "
        "events all of all generations.",
    )
    failures: list[CauseDocument] = Field(description="The cause of each failed generation, oldest first.")
    refusals: list[RefusalDocument]
    waits_for: str | None = Field(description="What a waiting run lacks, as text.")
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None


class RunList(BaseModel):
    """A page of runs, newest first."""

    runs: list[RunDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS


class EventDocument(RecordDocument):
    """An event of a run."""

    id: int
    at: datetime
    kind: str
    detail: str


class EventList(BaseModel):
    """Events of a run, oldest first; pass the last id as ``after`` to get the next ones."""

    events: list[EventDocument]
