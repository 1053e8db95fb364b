"""JSON documents of checks and estimates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from zbv_solver.documents.fields import Number
from zbv_solver.packing.batch import BatchDocument
from zbv_solver.plans.reading import BaselineDocument

from zbv_service.documents.problems import QuestionDocument
from zbv_service.plans.documents import ClaimDocument
from zbv_service.records.plans import PlanSummaryDocument
from zbv_service.records.shared import ProblemSummary, RequestDocument

Fraction = Annotated[Number, Field(gt=0, le=1000, allow_inf_nan=False)]


class CheckRequest(RequestDocument):
    """A body for ``POST /v1/searches``, valid or not."""

    problem: Any = Field(description="A problem document.")
    options: Any = Field({}, description="Options of a search.")
    limit_fraction: Fraction | None = Field(
        None,
        description="Instead of memory.limit: a fraction of the memory of 1F1B's activations on the same "
        "model, in addition to static memory.",
    )
    plan: Any = Field(
        None, description="A plan document to check against the problem, together with its claims."
    )


class IssueDocument(BaseModel):
    """A broken rule."""

    pointer: str = Field(description="RFC 6901 JSON pointer into the body that was sent.")
    detail: str = Field(description="What was found, what the rule is, and what to do.")


class PlanCheck(BaseModel):
    """Whether a plan solves a problem, and which of its claims were verified."""

    is_valid: bool
    issues: list[IssueDocument]
    claims: list[ClaimDocument] = Field(
        description="Lower bounds are not verified here: `zbv check --prove` proves them."
    )


class ProblemFacts(BaseModel):
    """Facts that follow from a problem without a search."""

    stages: int
    actions: int = Field(description="Number of actions on all ranks, with every backward split.")
    limit: list[float] | None = Field(description="Per rank, in the memory unit; null is unlimited.")
    limit_fraction: float | None = Field(
        description="The limit of the tightest rank as a fraction of 1F1B's memory."
    )
    smallest_limit: list[float] = Field(description="Per rank, the smallest limit that some plan fits.")
    smallest_fraction: float | None = Field(description="The smallest fraction that some plan fits.")
    fits: bool = Field(description="Whether the limit is at least the smallest one.")
    one_f_one_b_memory: float = Field(
        description="Memory of 1F1B's activations on the rank that holds most; the fraction 1."
    )
    busy: list[float] = Field(description="Minimal work per rank; no iteration is shorter.")


class PlacementFacts(BaseModel):
    """A placement that a search considers."""

    placement: str
    chunks: int = Field(description="Stages per rank.")
    stages: int


class LayersFacts(BaseModel):
    """Facts about layers that are not cut into stages yet."""

    layers: int = Field(description="Copies counted.")
    parts: int = Field(description="Number of layers that a cut can separate; a group of `together` is one.")
    placements: list[PlacementFacts]
    work: float = Field(description="Least work of a microbatch on all layers.")
    least_busy: float = Field(
        description="Minimal work of the busiest rank over all cuts that fit; no iteration is shorter."
    )
    static: float = Field(description="Static memory of all layers, in the memory unit.")
    held: float = Field(description="Activation memory of one microbatch without recomputation.")
    limit: list[float] | None = Field(description="Per rank, in the memory unit; null is unlimited.")
    can_recompute: bool = Field(description="Whether any layer has an alternative.")


class ProblemCheck(BaseModel):
    """Whether a search would be accepted."""

    is_valid: bool
    issues: list[IssueDocument]
    problem_summary: ProblemSummary | None = Field(description="Null unless the problem is valid.")
    facts: ProblemFacts | None = Field(
        description="Null unless the problem is valid and its stages are known."
    )
    layers: LayersFacts | None = Field(
        None, description="Instead of facts, for a valid problem with layers that are not cut yet."
    )
    plan: PlanCheck | None = Field(None, description="Null unless a plan was sent and the problem is valid.")


class EstimateRequest(RequestDocument):
    """A problem to estimate."""

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


class ProblemEstimate(BaseModel):
    """The result of a very short search. Nothing is stored."""

    problem_summary: ProblemSummary
    lower_bound: float = Field(description="No plan of the problem has a smaller objective.")
    plan: EstimatedPlan | None = Field(
        description="A verified plan found in about half a second; a search may find a better one. Null for "
        "problems that are too large."
    )
    baselines: list[BaselineDocument] = Field(
        description="As in a plan; `fits` says whether the memory limit is met."
    )


class CompareRequest(RequestDocument):
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


class PackRequest(RequestDocument):
    """A batch to pack."""

    batch: BatchDocument


class PackedReplica(BaseModel):
    """What one replica runs."""

    microbatches: list[list[int]] = Field(
        description="Per microbatch, the indices of its sequences in the batch, counted from 0."
    )
    sequences: list[list[int]] = Field(description="Per microbatch, the lengths of its sequences.")
    step_time: float = Field(description="The objective of a plan of this problem; a search may find better.")
    problem: dict[str, Any] = Field(
        description="The problem of these microbatches, as `POST /v1/searches` takes it; its plan numbers "
        "them in this order."
    )


class OtherPacking(BaseModel):
    """Another method's packing of the same batch."""

    name: str
    microbatches: int = Field(description="Of all replicas together.")
    estimate: float


class ProblemPacking(BaseModel):
    """A batch as microbatches of replicas. Nothing is stored."""

    objective: str
    step_time: float = Field(description="Of the slowest replica; all replicas wait for it.")
    lower_bound: float = Field(
        description="No packing of the batch into microbatches of at most max_tokens has plans with a "
        "smaller step time."
    )
    gap: float | None = Field(description="step_time / lower_bound - 1.")
    estimate: float = Field(description="Of the step, without ramps.")
    replicas: list[PackedReplica]
    baselines: list[OtherPacking] = Field(description="The usual packing, by the same estimate.")
