"""Plans: orders for all ranks, their metrics, and their identity.

The identity of a plan is the SHA-256 of the canonical JSON of its problem and ranks. Metrics, baselines and
provenance are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from zbv_solver._version import __version__
from zbv_solver.documents.files import canonical_json, plain, write
from zbv_solver.plans.certificate import Status
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.simulation import Simulation, simulation_json
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.problem.writing import problem_json

UNNAMED = "this plan"
"""The name of a plan that does not say how it was made."""


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
        """The picture and the metrics, for notebooks."""
        return None if notebook_html is None else notebook_html(self)


notebook_html: Callable[[Plan], str] | None = None
"""Draws a plan for a notebook. The package's face sets it, because `export` is built on this folder."""


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
