"""JSON documents of plans, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field
from zbv_solver.plans.reading import BaselineDocument, CutDocument, MetricsDocument, ProvenanceDocument
from zbv_solver.problem.problem import Objective
from zbv_solver.search.claims import Claim

from zbv_service.documents.problems import QuestionDocument
from zbv_service.documents.shared import (
    NEXT,
    PREVIOUS,
)
from zbv_service.records.searches import PlanSummary


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
