"""The JSON that enters and leaves over HTTP, as pydantic models: the named schemas of the API."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from zbv_solver.documents.fields import Number
from zbv_solver.plans.reading import BaselineDocument, CutDocument, MetricsDocument, ProvenanceDocument
from zbv_solver.problem.problem import Objective
from zbv_solver.search.claims import Claim

from zbv_service.documents.problems import QuestionDocument
from zbv_service.errors import ProblemDetails
from zbv_service.records.searches import PlanSummary, SearchRecord, SearchState

MAX_SEED = 2**31 - 1


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OptionsDocument(_Request):
    """How hard to search. Equal options and seed give equal plans, unless a time limit cuts them off."""

    effort: Literal["quick", "standard", "thorough"] = "standard"
    time_limit: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds; null means that effort alone decides."
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] = 0


class SearchRequest(_Request):
    """A problem to search a plan for."""

    problem: QuestionDocument
    options: OptionsDocument = OptionsDocument()


class ProblemSummary(BaseModel):
    """The few numbers that name a problem."""

    pp_degree: int
    microbatches: int
    placement: str
    objective: Objective
    time_unit: str | None = None
    layers: int | None = Field(None, description="Of a problem given by layers: how many, copies counted.")


class SearchDocument(BaseModel):
    """A search, running or ended.

    ``objective``, ``lower_bound`` and ``gap`` are those of the best plan known so far.
    """

    id: str
    state: SearchState
    problem_summary: ProblemSummary
    options: OptionsDocument
    objective: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    method: str | None = None
    plan_id: str | None = Field(None, description="Set once the search is done, or cancelled with a plan.")
    error: ProblemDetails | None = Field(None, description="Why there is no plan.")
    cancel_requested: bool = False
    queued_before: int | None = Field(
        None, description="Searches that start before a queued one; only where one search is asked for."
    )
    attempts: int = Field(0, description="How often the search was started; more than 1 after a restart.")
    created_at: datetime
    started_at: datetime | None = None
    updated_at: datetime
    finished_at: datetime | None = None

    @classmethod
    def of(cls, record: SearchRecord, queued_before: int | None = None) -> SearchDocument:
        """The document of a stored search."""
        error = None if record.error is None else ProblemDetails.model_validate(record.error)
        return cls(
            id=record.id,
            state=record.state,
            problem_summary=ProblemSummary.model_validate(record.summary),
            options=OptionsDocument.model_validate(record.options),
            objective=record.objective,
            lower_bound=record.lower_bound,
            gap=record.gap,
            method=record.method,
            plan_id=record.plan_id,
            error=error,
            cancel_requested=record.cancel_requested,
            queued_before=queued_before,
            attempts=record.attempts,
            created_at=record.created_at,
            started_at=record.started_at,
            updated_at=record.updated_at,
            finished_at=record.finished_at,
        )

    def json_bytes(self) -> bytes:
        """The document as UTF-8 JSON."""
        return _dump(self._json())

    def _json(self) -> dict[str, Any]:
        document: dict[str, Any] = self.model_dump(mode="json")
        if self.error is not None:
            document["error"] = self.error.model_dump(mode="json", exclude_none=True)
        return document


NEXT = Field(None, description="Address of the page of older ones after this; null on the last.")
PREVIOUS = Field(None, description="Address of the page of newer ones before this; null on the first.")


class SearchList(BaseModel):
    """Some of the searches, the newest first."""

    searches: list[SearchDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS

    def json_bytes(self) -> bytes:
        """The document as UTF-8 JSON."""
        searches = [search._json() for search in self.searches]
        return _dump({"searches": searches, "next": self.next, "previous": self.previous})


class PlanSummaryDocument(BaseModel):
    """A stored plan without its actions."""

    plan_id: str
    pp_degree: int
    microbatches: int
    placement: str
    objective: Objective
    value: float = Field(description="Of the objective, in the problem's time unit.")
    lower_bound: float
    gap: float | None
    status: Literal["optimal", "feasible"]
    bubble_rate: float
    method: str
    time_unit: str | None
    created_at: datetime

    @classmethod
    def of(cls, summary: PlanSummary) -> PlanSummaryDocument:
        """The document of a stored plan."""
        return cls.model_validate(asdict(summary))


class PlanList(BaseModel):
    """Some of the plans, the newest first."""

    plans: list[PlanSummaryDocument]
    next: str | None = NEXT
    previous: str | None = PREVIOUS


class CompareRequest(_Request):
    """A problem to see the classical schedules of."""

    problem: QuestionDocument


class Comparison(BaseModel):
    """What the classical schedules achieve on a problem's model. Nothing is searched or stored."""

    problem_summary: ProblemSummary
    lower_bound: float = Field(description="No plan of the problem has a smaller objective.")
    baselines: list[BaselineDocument] = Field(description="As in a plan; fits judges the memory limit.")
    best: PlanSummaryDocument | None = Field(
        description="The best stored plan of this problem, if there is one."
    )


class PlanDocument(BaseModel):
    """A plan. To import one, only ``problem`` and ``ranks`` are needed; the service computes the rest."""

    plan_id: str | None = Field(None, description="SHA-256 of the canonical JSON of problem and ranks.")
    problem: QuestionDocument
    objective: Objective | None = None
    ranks: list[list[str]] = Field(description="Every rank's actions in execution order, such as 7I3.")
    metrics: MetricsDocument | None = None
    baselines: list[BaselineDocument] = []
    provenance: ProvenanceDocument = ProvenanceDocument()
    partition: list[list[str]] | None = Field(
        None, description="Of a problem given by layers: the layer names of every stage."
    )
    recompute: list[bool] | None = Field(
        None, description="Which stages are recomputed in their backward; where a layer has an alternative."
    )
    cut: CutDocument | None = Field(
        None, description="How the layers came to be cut, and a bound on the plans of every other cut."
    )


class ClaimDocument(BaseModel):
    """A claim of a plan document, and whether it was verified."""

    pointer: str = Field(description="RFC 6901 JSON pointer to the claim in the plan.")
    text: str = Field(description="What is claimed.")
    is_verified: bool = Field(description="A claim that was checked and is false is an error instead.")
    reason: str = Field(description="How it was verified, or why it was not.")

    @classmethod
    def of(cls, claim: Claim) -> ClaimDocument:
        """A claim as JSON."""
        return cls(**asdict(claim))


class ImportedPlan(BaseModel):
    """Where an imported plan is, and what of it was verified."""

    plan_id: str
    objective: float
    lower_bound: float = Field(description="Computed by the service; a bound in the plan is not taken over.")
    gap: float | None
    claims: list[ClaimDocument] = Field(
        description="What the plan stated. Claims that were not verified are not stored."
    )


class ChannelDocument(BaseModel):
    """Tensors of one kind that a rank sends to a peer, or receives from it."""

    peer: int
    direction: Literal["send", "receive"]
    kind: Literal["activation", "gradient"]
    transfers: list[str] = Field(
        description="boundary:microbatch, in the order in which the sending rank produces them. "
        "Boundary s lies between stages s and s + 1."
    )


class RankDocument(BaseModel):
    """What one rank needs to execute its part of a plan."""

    plan_id: str
    rank: int
    pp_degree: int
    microbatches: int
    placement: Literal["v", "loop", "single"]
    chunks: int = Field(description="Stages per rank.")
    stages: list[int] = Field(description="The rank's stages in model order.")
    actions: list[str] = Field(description="In execution order.")
    peers: list[int] = Field(description="The ranks it exchanges tensors with.")
    channels: list[ChannelDocument]
    partition: list[list[str]] | None = Field(
        None, description="Layer names of every stage, not of this rank's alone; only of a plan from layers."
    )
    recompute: list[bool] | None = Field(
        None, description="Of every stage, whether it is recomputed; only where the plan says so."
    )


class Health(BaseModel):
    """A sign of life."""

    status: Literal["ok"] = "ok"


def _dump(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
