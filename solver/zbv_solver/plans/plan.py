"""Plans: orders for all ranks, their metrics, what a lower bound proves about them, and their identity.

The gap and the status of a plan are computed here only (:func:`certify`).

The identity of a plan is the SHA-256 of the canonical JSON of its problem and ranks. Metrics, baselines and
provenance are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zbv_solver._version import __version__
from zbv_solver.documents.files import canonical_json, plain, write
from zbv_solver.errors import ContradictedBound
from zbv_solver.kernels.jit import can_compile
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.layered_problem import AnyProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Objective, Problem, objective_value
from zbv_solver.problem.writing import any_problem_json, problem_json

if TYPE_CHECKING:  # only plans for durations that vary have one
    from zbv_solver.problem.jitter import Jitter

ROUNDING = 1e-11
"""Relative errors of a lower bound that are below this come from rounding."""
UNNAMED = "this plan"
"""The name of a plan that does not say how it was made."""
Status = Literal["optimal", "feasible"]


@dataclass(frozen=True)
class Metrics:
    """Metrics of a plan's orders; docs/formats.md defines them."""

    makespan: float
    span: float
    bubble_rate: float
    peak_memory: tuple[float, ...]
    """Per rank (p,), static memory included."""
    lower_bound: float
    """A proven bound: no plan of this problem has a smaller objective."""
    gap: float
    """objective / lower_bound - 1."""
    status: Status


@dataclass(frozen=True)
class Baseline:
    """Metrics of a classical schedule on the same model."""

    name: str
    span: float
    makespan: float
    bubble_rate: float
    peak_memory: tuple[float, ...]
    fits: bool
    """Whether it keeps the memory limit."""
    layers_per_stage: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] | None = None
    """For layers, the cut of a classical schedule, as layers and recomputation of every stage: the best that
    was found for its own order."""


@dataclass(frozen=True)
class CutCertificate:
    """How the cut of a plan's layers was found, and a lower bound over all cuts."""

    method: str
    """The method that found the cut."""
    lower_bound: float
    """A proven bound: no plan of any contiguous cut of the layers, on any placement that the problem allows,
    has a smaller objective."""
    gap: float
    """objective / lower_bound - 1."""


@dataclass(frozen=True)
class Spans:
    """The time of an iteration over many scenarios, in the problem's time unit."""

    expected_span: float
    p95_span: float
    """Mean and 0.95 quantile, of iterations that follow each other back to back."""
    expected_makespan: float
    p95_makespan: float
    """The same of iterations that all ranks begin together."""

    def of(self, objective: Objective) -> tuple[float, float]:
        """The mean and the 0.95 quantile of an objective."""
        if objective == "span":
            return self.expected_span, self.p95_span
        return self.expected_makespan, self.p95_makespan


@dataclass(frozen=True)
class SimulatedBaseline:
    """A classical schedule in the same scenarios; ``fits`` says whether it keeps the memory limit."""

    name: str
    spans: Spans
    fits: bool


@dataclass(frozen=True)
class Simulation:
    """How a plan and its baselines behave when durations vary."""

    jitter: Jitter
    scenarios: int
    """Number of simulated iterations of every schedule."""
    seed: int
    """Of the random draws, which all schedules share."""
    spans: Spans
    baselines: tuple[SimulatedBaseline, ...]


@dataclass(frozen=True)
class Provenance:
    """How a plan was found."""

    method: str
    seed: int = 0
    seconds: float = 0.0
    version: str = __version__
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A problem's answer, made by :func:`zbv_solver.plan` or read by :func:`zbv_solver.load_plan`.

    ``simulation`` is set if the plan was searched for durations that vary.
    """

    problem: Problem
    orders: Orders
    metrics: Metrics
    baselines: tuple[Baseline, ...] = ()
    provenance: Provenance = Provenance(method="unknown")
    cut: CutCertificate | None = None
    simulation: Simulation | None = None

    @cached_property
    def plan_id(self) -> str:
        """SHA-256 of the canonical JSON of problem and ranks, in hex."""
        return identity(problem_json(self.problem), self.orders.all_text())

    @property
    def objective(self) -> float:
        """Value of the problem's objective."""
        return objective_value(self.problem.objective, self.metrics)

    @property
    def origin(self) -> str:
        """What made the plan: ``zbv`` for its own search, else the stated method, such as ``torch 1F1B``."""
        # Every search states its effort.
        is_searched = "effort" in self.provenance.extra
        return (
            "zbv"
            if is_searched
            else UNNAMED
            if self.provenance.method == "unknown"
            else self.provenance.method
        )

    def rank(self, rank: int) -> list[str]:
        """The actions of a rank in execution order, such as ``"0F3"``: stage 0, forward, microbatch 3."""
        return self.orders.text(rank)

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file; the file is replaced atomically.

        Raises
        ------
        OSError
            When the file cannot be written.
        """
        write(path, json.dumps(plan_json(self)) + "\n")

    def _repr_html_(self) -> str | None:
        """The picture and the metrics, for notebooks; None without Numba."""
        if not can_compile():
            return None
        from zbv_solver.export.html import plan_html  # upwards: only the plan itself is asked

        return plan_html(self)


def identity(problem: dict[str, Any], ranks: list[list[str]]) -> str:
    """The ``plan_id`` of a normalised problem document and the text of its actions."""
    text = canonical_json({"problem": problem, "ranks": ranks})
    return hashlib.sha256(text.encode()).hexdigest()


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as a JSON document."""
    provenance, cut_model = plan.provenance, plan.problem.model
    problem, ranks = problem_json(plan.problem), plan.orders.all_text()
    # The identity is a hash of these texts. For large plans it saves time not to make them twice.
    if "plan_id" not in vars(plan):
        vars(plan)["plan_id"] = identity(problem, ranks)
    document = {
        "plan_id": plan.plan_id,
        "problem": problem,
        "objective": plan.problem.objective,
        "ranks": ranks,
        "metrics": plain(plan.metrics),
        "baselines": plain(plan.baselines),
        "provenance": {
            "version": provenance.version,
            "seed": provenance.seed,
            "method": provenance.method,
            "seconds": round(provenance.seconds, 6),
            **provenance.extra,
        },
    }
    if plan.simulation is not None:
        document["simulation"] = simulation_json(plan.simulation)
    if cut_model is not None:
        document["partition"] = plain(cut_model.partition)
        if cut_model.model.can_recompute:
            document["recompute"] = plain(cut_model.cut.recompute)
        if plan.cut is not None:
            document["cut"] = plain(plan.cut)
    return document


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    """A simulation as a JSON document."""
    from zbv_solver.problem.jitter import jitter_json

    return {
        "jitter": jitter_json(simulation.jitter),
        "scenarios": simulation.scenarios,
        "seed": simulation.seed,
        **plain(simulation.spans),
        "baselines": [
            {"name": each.name, **plain(each.spans), "fits": each.fits} for each in simulation.baselines
        ],
    }


@dataclass(frozen=True)
class Certificate:
    """A proved bound on an objective, and the resulting gap."""

    lower_bound: float
    """Never above the objective: a bound that exceeds it by rounding only is set to the objective."""
    gap: float
    """objective / lower_bound - 1."""
    status: Status


def verdict(objective: float, lower_bound: float) -> Literal["contradicted", "optimal", "feasible"]:
    """Whether a lower bound proves a verified plan optimal, or contradicts it by more than rounding."""
    if lower_bound > objective * (1 + OPTIMAL_GAP):
        return "contradicted"
    return "optimal" if gap_of(objective, lower_bound) == 0 else "feasible"


def gap_of(objective: float, lower_bound: float) -> float:
    """objective / lower_bound - 1, relative; 0 when both are 0 or the difference is rounding."""
    if lower_bound > 0:
        gap = objective / lower_bound - 1
        return 0.0 if abs(gap) <= OPTIMAL_GAP else gap
    return 0.0 if objective <= 0 else math.inf


def certify(problem: AnyProblem, objective: float, lower_bound: float, source: str) -> Certificate:
    """The certificate of a verified plan of a problem.

    Parameters
    ----------
    source
        Where the bound comes from, for error messages.

    Raises
    ------
    ContradictedBound
        When the objective is below the bound by more than rounding.
    """
    found = verdict(objective, lower_bound)
    if found == "contradicted":
        raise ContradictedBound(any_problem_json(problem), objective, lower_bound, source)
    if found == "optimal":
        return Certificate(objective, 0.0, "optimal")
    # Sums of whole numbers differ from one by rounding only.
    whole = float(round(lower_bound))
    lower_bound = whole if abs(lower_bound - whole) <= ROUNDING * lower_bound else lower_bound
    return Certificate(lower_bound, gap_of(objective, lower_bound), "feasible")
