"""The answer: an order for every rank, what it achieves, and its identity.

A plan's identity is the SHA-256 of the canonical JSON of its problem and ranks; metrics, baselines and
provenance describe it and are not part of it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zbv_solver import __version__
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.plans.certificate import Status
from zbv_solver.plans.certificate import gap_of as gap_of
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.layer import MAX_LAYERS
from zbv_solver.problem.problem import MAX_PP_DEGREE, Objective, Problem
from zbv_solver.problem.stage_document import (
    MAX_ACTIONS,
    MAX_NAME,
    MAX_STAGES,
    MAX_TEXT,
    AtMost,
    Number,
    canonical_json,
    number,
    numbers,
    parse_problem,
    problem_json,
    refusal,
)


@dataclass(frozen=True)
class Metrics:
    """What an order achieves (definitions: docs/formats.md).

    Attributes
    ----------
    peak_memory
        Per rank (p,), static memory included.
    lower_bound
        A proven bound: no plan of this problem has a smaller objective.
    gap
        objective / lower_bound - 1.
    """

    makespan: float
    span: float
    bubble_rate: float
    peak_memory: tuple[float, ...]
    lower_bound: float
    gap: float
    status: Status

    def value(self, objective: Objective) -> float:
        """The metric that is being minimised."""
        return self.span if objective == "span" else self.makespan


@dataclass(frozen=True)
class Baseline:
    """What a classical schedule achieves on the same model."""

    name: str
    span: float
    makespan: float
    bubble_rate: float
    peak_memory: tuple[float, ...]
    fits: bool


@dataclass(frozen=True)
class CutCertificate:
    """How the layers of a plan came to be cut, and what no other cut can beat.

    Attributes
    ----------
    method
        What made the cut.
    lower_bound
        A proven bound: no plan of any contiguous cut of the layers, on the placements that were asked for,
        has a smaller objective.
    gap
        objective / lower_bound - 1.
    """

    method: str
    lower_bound: float
    gap: float


@dataclass(frozen=True)
class Provenance:
    """How a plan came to be."""

    method: str
    seed: int = 0
    seconds: float = 0.0
    version: str = __version__
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A problem's answer. Make one with :func:`zbv_solver.search.search.search` or :func:`parse_plan`."""

    problem: Problem
    orders: Orders
    metrics: Metrics
    baselines: tuple[Baseline, ...] = ()
    provenance: Provenance = Provenance(method="unknown")
    cut: CutCertificate | None = None

    @cached_property
    def plan_id(self) -> str:
        """SHA-256 of the canonical JSON of problem and ranks, in hex."""
        return identity(problem_json(self.problem), self.orders.all_text())

    @property
    def objective(self) -> float:
        """Value of the problem's objective."""
        return self.metrics.value(self.problem.objective)

    def with_baselines(self, baselines: tuple[Baseline, ...]) -> Plan:
        """The same plan with other baselines beside it."""
        return replace(self, baselines=baselines)


def identity(problem: dict[str, Any], ranks: list[list[str]]) -> str:
    """The ``plan_id`` of a normalised problem document and its action texts."""
    text = canonical_json({"problem": problem, "ranks": ranks})
    return hashlib.sha256(text.encode()).hexdigest()


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON document."""
    metrics, provenance = plan.metrics, plan.provenance
    problem, ranks = problem_json(plan.problem), plan.orders.all_text()
    # The identity is a hash of these texts: a large plan should not write them twice.
    if "plan_id" not in vars(plan):
        vars(plan)["plan_id"] = identity(problem, ranks)
    document = {
        "plan_id": plan.plan_id,
        "problem": problem,
        "objective": plan.problem.objective,
        "ranks": ranks,
        "metrics": {
            "makespan": number(metrics.makespan),
            "span": number(metrics.span),
            "bubble_rate": number(metrics.bubble_rate),
            "peak_memory": numbers(metrics.peak_memory),
            "lower_bound": number(metrics.lower_bound),
            "gap": number(metrics.gap) if math.isfinite(metrics.gap) else None,
            "status": metrics.status,
        },
        "baselines": [baseline_json(baseline) for baseline in plan.baselines],
        "provenance": {
            "version": provenance.version,
            "seed": provenance.seed,
            "method": provenance.method,
            "seconds": round(provenance.seconds, 6),
            **provenance.extra,
        },
    }
    return {**document, **_layers_json(plan)}


def _layers_json(plan: Plan) -> dict[str, Any]:
    """What a plan says of the layers that were cut; nothing where its problem was given by stages."""
    model, cut = plan.problem.model, plan.cut
    if model is None:
        return {}
    document: dict[str, Any] = {"partition": [list(names) for names in model.partition]}
    if model.model.can_recompute:
        document["recompute"] = list(model.cut.recompute)
    if cut is not None:
        gap = number(cut.gap) if math.isfinite(cut.gap) else None
        document["cut"] = {"method": cut.method, "lower_bound": number(cut.lower_bound), "gap": gap}
    return document


def baseline_json(baseline: Baseline) -> dict[str, Any]:
    """A baseline as a JSON document."""
    return {
        "name": baseline.name,
        "span": number(baseline.span),
        "makespan": number(baseline.makespan),
        "bubble_rate": number(baseline.bubble_rate),
        "peak_memory": numbers(baseline.peak_memory),
        "fits": baseline.fits,
    }


MAX_BASELINES = 100
Stated = Annotated[Number, Field(allow_inf_nan=False)]
"""A number that a plan states. No comparison with NaN or infinity would show that it is false."""
PerRank = Annotated[list[Stated], AtMost(MAX_PP_DEGREE)]
Ranks = Annotated[list[Annotated[list[str], AtMost(MAX_ACTIONS)]], AtMost(MAX_PP_DEGREE)]
"""Every rank's actions."""
_Line = Annotated[str, Field(max_length=MAX_NAME)]
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_StatedPartition = Annotated[list[Annotated[list[str], AtMost(MAX_LAYERS)]], AtMost(MAX_STAGES)]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow")


class MetricsDocument(_Lenient):
    """Stated metrics of a plan."""

    makespan: Stated
    span: Stated
    bubble_rate: Stated
    peak_memory: PerRank
    lower_bound: Stated = 0.0
    gap: Stated | None = None
    status: Status = "feasible"


class BaselineDocument(_Lenient):
    """Stated metrics of a baseline."""

    name: _Line
    span: Stated
    makespan: Stated
    bubble_rate: Stated
    peak_memory: PerRank
    fits: bool


class ProvenanceDocument(_Lenient):
    """How a plan came to be."""

    version: _Line = "unknown"
    seed: int = 0
    method: _Text = "unknown"
    seconds: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class CutDocument(_Lenient):
    """Stated certificate of a cut."""

    method: _Text = "unknown"
    lower_bound: Stated = 0.0
    gap: Stated | None = None


class PlanDocument(_Lenient):
    """A plan file. Only ``problem`` and ``ranks`` are needed; stated metrics are checked when present."""

    plan_id: _Line | None = None
    problem: dict[str, Any]
    objective: Objective | None = None
    ranks: Ranks
    metrics: MetricsDocument | None = None
    baselines: Annotated[list[BaselineDocument], AtMost(MAX_BASELINES)] = []
    provenance: ProvenanceDocument = ProvenanceDocument()
    partition: _StatedPartition | None = None
    recompute: Annotated[list[bool], AtMost(MAX_STAGES)] | None = None
    cut: CutDocument | None = None


def parse_plan_document(document: Any) -> PlanDocument:
    """Check a decoded plan document's shape; raises :class:`InvalidInput`."""
    try:
        return PlanDocument.model_validate(document)
    except ValidationError as error:
        raise refusal(error, document) from None


def parse_orders(document: PlanDocument) -> tuple[Problem, Orders]:
    """The problem and orders of a plan document, metrics left aside; raises :class:`InvalidInput`."""
    try:
        problem = parse_problem(document.problem)
    except InvalidInput as error:
        raise error.below("/problem") from None
    if len(document.ranks) != problem.pp_degree:
        raise InvalidInput.at(
            "/ranks", f"found {len(document.ranks)} lists; must be {problem.pp_degree}, one per rank."
        )
    if document.objective is not None and document.objective != problem.objective:
        raise InvalidInput.at(
            "/objective", f"found {document.objective!r}; the plan's problem says {problem.objective!r}."
        )
    _require_possible_length(document, problem)
    _require_layers(document, problem)
    orders = Orders.from_text(document.ranks)
    stated = document.plan_id
    if stated is not None and stated != (found := identity(problem_json(problem), document.ranks)):
        raise InvalidInput.at(
            "/plan_id", f"found {stated}; its problem and ranks hash to {found}. The plan was altered."
        )
    return problem, orders


def _require_possible_length(document: PlanDocument, problem: Problem) -> None:
    """Raise for lists that are far too long: whoever verifies them looks at every action."""
    found, most = sum(map(len, document.ranks)), 2 * problem.max_actions
    if found > most:
        raise InvalidInput.at(
            "/ranks",
            f"found {found} actions; the problem has at most {problem.max_actions}: F, I and W of every "
            f"stage and microbatch.",
        )


def _require_layers(document: PlanDocument, problem: Problem) -> None:
    """Raise where a plan states another partition than its problem has."""
    model = problem.model
    for name, stated, ours in (
        ("partition", document.partition, None if model is None else list(map(list, model.partition))),
        ("recompute", document.recompute, None if model is None else list(model.cut.recompute)),
    ):
        if stated is not None and stated != ours:
            raise InvalidInput.at(
                f"/{name}", f"differs from the problem's; remove it, or correct /problem/{name}."
            )


def parse_plan(document: Any) -> Plan:
    """Read a plan document with its stated metrics. It is *not* verified: see :mod:`zbv_solver.verify.verifier`.

    Raises
    ------
    InvalidInput
        When the document has the wrong shape or states no metrics.
    """
    parsed = parse_plan_document(document)
    problem, orders = parse_orders(parsed)
    stated = parsed.metrics
    if stated is None:
        raise InvalidInput([Issue("/metrics", "this key is required and absent.")])
    value = stated.span if problem.objective == "span" else stated.makespan
    metrics = Metrics(
        makespan=stated.makespan,
        span=stated.span,
        bubble_rate=stated.bubble_rate,
        peak_memory=tuple(stated.peak_memory),
        lower_bound=stated.lower_bound,
        gap=gap_of(value, stated.lower_bound) if stated.gap is None else stated.gap,
        status=stated.status,
    )
    baselines = tuple(
        Baseline(b.name, b.span, b.makespan, b.bubble_rate, tuple(b.peak_memory), b.fits)
        for b in parsed.baselines
    )
    provenance = parsed.provenance
    return Plan(
        problem,
        orders,
        metrics,
        baselines,
        Provenance(
            provenance.method,
            provenance.seed,
            provenance.seconds,
            provenance.version,
            dict(provenance.model_extra or {}),
        ),
        None if parsed.cut is None else _certificate(parsed.cut, value),
    )


def _certificate(cut: CutDocument, value: float) -> CutCertificate:
    gap = gap_of(value, cut.lower_bound) if cut.gap is None else cut.gap
    return CutCertificate(cut.method, cut.lower_bound, gap)
