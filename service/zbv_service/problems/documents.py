"""Checks and estimates of problems as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from zbv_solver.plans.plan import BaselineDocument
from zbv_solver.problem.stage_document import Number

from zbv_service.documents.problems import QuestionDocument
from zbv_service.documents.shared import ClaimDocument, ProblemSummary


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


Fraction = Annotated[Number, Field(gt=0, le=1000, allow_inf_nan=False)]


class CheckRequest(_Request):
    """What would be sent to ``/v1/searches``, right or wrong."""

    problem: Any = Field(description="A problem document.")
    options: Any = Field({}, description="Options of a search.")
    limit_fraction: Fraction | None = Field(
        None,
        description="In place of memory.limit: a fraction of the memory that 1F1B's activations take on the "
        "same model, on top of what is static.",
    )
    plan: Any = Field(
        None, description="A plan document that is to answer the problem: its claims are checked, too."
    )


class IssueDocument(BaseModel):
    """A broken rule."""

    pointer: str = Field(description="RFC 6901 JSON pointer into the body that was sent.")
    detail: str = Field(description="What was found, what the rule is, and what to do.")


class PlanCheck(BaseModel):
    """Whether a plan answers a problem, and which of its claims were verified."""

    is_valid: bool
    issues: list[IssueDocument]
    claims: list[ClaimDocument] = Field(
        description="Lower bounds are not verified here: `zbv check --prove` proves them."
    )


class ProblemFacts(BaseModel):
    """What can be said of a problem without searching."""

    stages: int
    actions: int = Field(description="Of all ranks, where every backward is split.")
    limit: list[float] | None = Field(description="Of every rank, in the memory unit; null is unlimited.")
    limit_fraction: float | None = Field(description="The tightest rank's, of 1F1B's memory.")
    smallest_limit: list[float] = Field(description="The smallest of every rank that some plan fits.")
    smallest_fraction: float | None = Field(description="The smallest fraction that some plan fits.")
    fits: bool = Field(description="Whether the limit is at least the smallest one.")
    one_f_one_b_memory: float = Field(
        description="What 1F1B's activations take on the rank that holds most; a fraction of 1."
    )
    busy: list[float] = Field(description="Least work of every rank; no iteration is shorter.")


class PlacementFacts(BaseModel):
    """A placement that is planned."""

    placement: str
    chunks: int = Field(description="Stages per rank.")
    stages: int


class LayersFacts(BaseModel):
    """What can be said of layers before they are cut into stages."""

    layers: int = Field(description="Copies counted.")
    parts: int = Field(description="What is left to be cut apart, with together's groups as one each.")
    placements: list[PlacementFacts]
    work: float = Field(description="Least work of a microbatch on all layers.")
    least_busy: float = Field(
        description="Least work of the busiest rank of any cut that fits; no iteration is shorter."
    )
    static: float = Field(description="What all layers hold while nothing runs, in the memory unit.")
    held: float = Field(description="What the forwards of one microbatch hold, with nothing recomputed.")
    limit: list[float] | None = Field(description="Of every rank, in the memory unit; null is unlimited.")
    can_recompute: bool = Field(description="Whether any layer has an alternative.")


class ProblemCheck(BaseModel):
    """Whether a search would be accepted."""

    is_valid: bool
    issues: list[IssueDocument]
    problem_summary: ProblemSummary | None = Field(description="Null unless the problem is valid.")
    facts: ProblemFacts | None = Field(
        description="Null unless the problem is valid, and its stages are known."
    )
    layers: LayersFacts | None = Field(
        None, description="In place of facts, of a valid problem whose layers are still to be cut."
    )
    plan: PlanCheck | None = Field(None, description="Null unless a plan was sent and the problem is valid.")


class EstimateRequest(_Request):
    """A problem to be estimated."""

    problem: QuestionDocument


class EstimatedPlan(BaseModel):
    """A verified plan without its actions."""

    span: float
    makespan: float
    bubble_rate: float
    peak_memory: list[float]
    gap: float | None = Field(description="Its objective / lower bound - 1.")
    status: Literal["optimal", "feasible"]
    method: str


class Estimate(BaseModel):
    """What a moment's search reaches on a problem. Nothing is stored."""

    problem_summary: ProblemSummary
    lower_bound: float = Field(description="No plan of the problem has a smaller objective.")
    plan: EstimatedPlan | None = Field(
        description="Of a verified plan that was found in about half a second; a search may find a better "
        "one. Null for problems that are too large."
    )
    baselines: list[BaselineDocument] = Field(description="As in a plan; fits judges the memory limit.")
