"""From plan documents to plans. Nothing is verified here: see :mod:`zbv_solver.verify`.

A plan file needs only ``problem`` and ``ranks``. Everything else that it states is optional.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from zbv_solver.documents.fields import MAX_NAME, MAX_TEXT, AtMost, Count, Number
from zbv_solver.documents.files import load, plain
from zbv_solver.documents.validation import require_kind, validated
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import (
    Baseline,
    CutCertificate,
    Metrics,
    Plan,
    Provenance,
    SimulatedBaseline,
    Simulation,
    Spans,
    Status,
    gap_of,
    identity,
)
from zbv_solver.problem.jitter import JitterDocument, parse_jitter
from zbv_solver.problem.numeric import MAX_ACTIONS, MAX_LAYERS, MAX_PP_DEGREE, MAX_STAGES
from zbv_solver.problem.problem import Objective, Problem, objective_value
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json

MAX_BASELINES = 100
Part = TypeVar("Part", Metrics, Baseline, CutCertificate, Spans, SimulatedBaseline, Simulation, Provenance)
Stated = Annotated[Number, Field(allow_inf_nan=False)]
"""A number that a plan states. It must be finite, because no comparison could refute NaN or infinity."""
PerRank = Annotated[tuple[Stated, ...], AtMost(MAX_PP_DEGREE)]
Ranks = Annotated[list[Annotated[list[str], AtMost(MAX_ACTIONS)]], AtMost(MAX_PP_DEGREE)]
"""Every rank's actions."""
_Amount = Annotated[int, Field(strict=True, ge=0)]
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
    layers_per_stage: Annotated[tuple[_Amount, ...], AtMost(MAX_STAGES)] | None = Field(
        None, description="The cut of a classical schedule, the best that was found for its own order."
    )
    recompute: Annotated[tuple[bool, ...], AtMost(MAX_STAGES)] | None = None


class ProvenanceDocument(_Lenient):
    """How a plan was found."""

    version: _Line = "unknown"
    seed: int = 0
    method: _Text = "unknown"
    seconds: Annotated[float, Field(allow_inf_nan=False)] = 0.0


class CutDocument(_Lenient):
    """The stated certificate of a cut."""

    method: _Text = "unknown"
    lower_bound: Stated = 0.0
    gap: Stated | None = None


class SpansDocument(_Lenient):
    """Stated times of an iteration over many scenarios."""

    expected_span: Stated
    p95_span: Stated
    expected_makespan: Stated
    p95_makespan: Stated


class SimulatedBaselineDocument(SpansDocument):
    """Stated times of a baseline in the same scenarios."""

    name: _Line
    fits: bool


class SimulationDocument(SpansDocument):
    """How a plan and its baselines behave when durations vary, by simulation."""

    jitter: JitterDocument
    scenarios: Count
    seed: int = 0
    baselines: Annotated[list[SimulatedBaselineDocument], AtMost(MAX_BASELINES)] = []


class PlanDocument(_Lenient):
    """A plan file. Only ``problem`` and ``ranks`` are required."""

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
    simulation: SimulationDocument | None = None


def load_plan_document(path: str | Path) -> PlanDocument:
    """Read a plan file and check its shape; ``-`` is standard input.

    Raises :class:`InvalidInput` when the file is not JSON or not a plan, and :class:`OSError` when it cannot
    be read.
    """
    return load(path, parse_plan_document)


def parse_plan_document(document: Any) -> PlanDocument:
    """Check a decoded plan document's shape; raises :class:`InvalidInput`."""
    require_kind(document, "plan")
    return validated(PlanDocument, document)


def parse_orders(document: PlanDocument) -> tuple[Problem, Orders]:
    """The problem and the orders of a plan document, without its metrics; raises :class:`InvalidInput`."""
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
    count, most = sum(map(len, document.ranks)), problem.max_actions
    if count > 2 * most:  # verification would look at every action
        rule = f"the problem has at most {most}: F, I and W of every stage and microbatch."
        raise InvalidInput.at("/ranks", f"found {count} actions; {rule}")
    _require_layers(document, problem)
    orders = Orders.from_text(document.ranks)
    stated = document.plan_id
    if stated is not None and stated != (found := identity(problem_json(problem), document.ranks)):
        raise InvalidInput.at(
            "/plan_id", f"found {stated}; its problem and ranks hash to {found}. The plan was altered."
        )
    return problem, orders


def _require_layers(document: PlanDocument, problem: Problem) -> None:
    """Raise when the plan states another partition than its problem."""
    cut_model = problem.model
    for name, stated, expected in (
        ("partition", document.partition, None if cut_model is None else plain(cut_model.partition)),
        ("recompute", document.recompute, None if cut_model is None else plain(cut_model.cut.recompute)),
    ):
        if stated is not None and stated != expected:
            raise InvalidInput.at(
                f"/{name}", f"differs from the problem's; remove it, or correct /problem/{name}."
            )


def parse_plan(document: Any) -> Plan:
    """Parse a decoded plan document. Its stated metrics are not verified (:mod:`zbv_solver.verify`).

    Raises :class:`InvalidInput` when the document has the wrong shape or states no metrics.
    """
    return to_plan(parse_plan_document(document))


def to_plan(parsed: PlanDocument) -> Plan:
    """The plan of a validated document, with the metrics that it states; raises :class:`InvalidInput`."""
    problem, orders = parse_orders(parsed)
    metrics, cut, provenance = parsed.metrics, parsed.cut, parsed.provenance
    if metrics is None:
        raise InvalidInput.at("/metrics", "this key is required and absent.")
    value = objective_value(problem.objective, metrics)

    def gap(stated: MetricsDocument | CutDocument) -> float:
        return gap_of(value, stated.lower_bound) if stated.gap is None else stated.gap

    return Plan(
        problem,
        orders,
        _built(Metrics, metrics, gap=gap(metrics)),
        tuple(map(to_baseline, parsed.baselines)),
        _built(Provenance, provenance, extra=dict(provenance.model_extra or {})),
        None if cut is None else _built(CutCertificate, cut, gap=gap(cut)),
        None if parsed.simulation is None else _simulation(parsed.simulation),
    )


def to_baseline(stated: BaselineDocument) -> Baseline:
    """A stated baseline."""
    return _built(Baseline, stated)


def _simulation(stated: SimulationDocument) -> Simulation:
    try:
        jitter = parse_jitter(stated.jitter)
    except InvalidInput as error:
        raise error.below("/simulation/jitter") from None
    baselines = tuple(_built(SimulatedBaseline, each, spans=_built(Spans, each)) for each in stated.baselines)
    return _built(Simulation, stated, jitter=jitter, spans=_built(Spans, stated), baselines=baselines)


def _built(kind: type[Part], stated: BaseModel, **others: Any) -> Part:
    """A part of a plan: a dataclass with the values of the keys that have its fields' names, and others."""
    names = {field.name for field in fields(kind)} & type(stated).model_fields.keys() - others.keys()
    return kind(**{name: getattr(stated, name) for name in names}, **others)
