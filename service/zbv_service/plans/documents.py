"""JSON documents of plans, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from zbv_solver.plans.reading import (
    BaselineDocument,
    CutDocument,
    MetricsDocument,
    ProvenanceDocument,
    SimulationDocument,
)
from zbv_solver.problem.jitter import Jitter, parse_jitter
from zbv_solver.problem.problem import Objective
from zbv_solver.search.claims import Claim

from zbv_service.documents.parsing import parse_json
from zbv_service.documents.problems import QuestionDocument
from zbv_service.records.shared import MAX_SEED, RequestDocument

MAX_JITTER = 4096
"""Most characters of a jitter in an address."""
MAX_SCENARIOS = 4096
DEFAULT_JITTER = "action=5%,transfer=20%"


class PlanDocument(BaseModel):
    """A plan. An import needs only ``problem`` and ``ranks``; the service computes the rest."""

    plan_id: str | None = Field(None, description="SHA-256 of the canonical JSON of problem and ranks.")
    problem: QuestionDocument
    objective: Objective | None = None
    ranks: list[list[str]] = Field(description="The actions of each rank in execution order, such as 7I3.")
    metrics: MetricsDocument | None = None
    baselines: list[BaselineDocument] = []
    provenance: ProvenanceDocument = ProvenanceDocument()
    partition: list[list[str]] | None = Field(
        None, description="The layer names of each stage, for a problem given by layers."
    )
    recompute: list[bool] | None = Field(
        None, description="Which stages are recomputed in their backward, if a layer has an alternative."
    )
    simulation: SimulationDocument | None = Field(
        None, description="The plan and its baselines when durations vary; only if the search asked for it."
    )
    cut: CutDocument | None = Field(
        None, description="How the layers were cut, and a bound on the plans of all cuts."
    )


class PlanSimulation(SimulationDocument):
    """A plan and the classical schedules when durations vary."""

    plan_id: str


class SimulationQuery(RequestDocument):
    """By how much durations vary, and how many iterations are simulated."""

    jitter: Annotated[str, Field(max_length=MAX_JITTER)] = Field(
        DEFAULT_JITTER,
        description="Relative standard deviations, such as 5% or action=5%,transfer=20% (keys: action, F, I, "
        "W, B, rank, transfer); or a jitter document as JSON text.",
    )
    scenarios: Annotated[int, Field(ge=1, le=MAX_SCENARIOS)] = 256
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0

    def read(self) -> Jitter:
        """The jitter; raises :class:`InvalidInput`, or :class:`ApiError` 400 for JSON that is none."""
        is_document = self.jitter.startswith("{")
        return parse_jitter(parse_json(bytearray(self.jitter.encode())) if is_document else self.jitter)


class ClaimDocument(BaseModel):
    """A claim of a plan document, and whether it was verified."""

    pointer: str = Field(description="RFC 6901 JSON pointer to the claim in the plan.")
    text: str = Field(description="The claim.")
    is_verified: bool = Field(description="False claims are errors instead.")
    reason: str = Field(description="How it was verified, or why it was not.")

    @classmethod
    def of(cls, claim: Claim) -> ClaimDocument:
        """A claim as JSON."""
        return cls(**asdict(claim))


class ImportedPlan(BaseModel):
    """An imported plan, and which of its claims were verified."""

    plan_id: str
    objective: float
    lower_bound: float = Field(description="Computed by the service; a bound in the plan is ignored.")
    gap: float | None
    claims: list[ClaimDocument] = Field(
        description="The claims of the plan. Claims that were not verified are not stored."
    )


class ChannelDocument(BaseModel):
    """All tensors that a rank sends to a peer, or receives from it."""

    peer: int
    direction: Literal["send", "receive"]
    transfers: list[str] = Field(
        description="In the order in which the sending rank produces them, and in which the receiving rank "
        "must post its receives. A3:0 is the activation, G3:0 the gradient, that crosses boundary 3 for "
        "microbatch 0. Boundary s lies between stages s and s + 1.",
        examples=[["A0:0", "A0:1", "G2:0"]],
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
        None, description="Layer names of all stages, not only of this rank; only for a plan from layers."
    )
    recompute: list[bool] | None = Field(
        None, description="Whether each stage is recomputed; only if the plan says so."
    )
