"""The few values of a plan that the service's own process needs, however large the plan is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from zbv_solver.construct.baselines import baseline_names
from zbv_solver.problem.problem import Units

from zbv_service.plans.renderings import plan_of


@dataclass(frozen=True)
class PlanFacts:
    """Values of a plan."""

    plan_id: str
    pp_degree: int
    microbatches: int
    objective: str
    value: float
    units: Units
    shape: str
    """What a run cannot change, as text."""
    cut: str | None
    """A hash of the layers of every stage; None where stages were given."""
    schedules: tuple[str, ...]
    """The names of the classical schedules of its problem."""


def facts_of(packed: bytes) -> PlanFacts:
    """The values of a packed plan; runs in another process."""
    plan = plan_of(packed)
    problem, placement = plan.problem, plan.problem.placement
    names = None if problem.model is None else repr(problem.model.partition)
    return PlanFacts(
        plan_id=plan.plan_id,
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        objective=problem.objective,
        value=plan.objective,
        units=problem.units,
        shape=f"{placement.pp_degree} ranks, {placement.chunks} stages each, placement {placement.kind}, "
        f"{problem.microbatches} microbatches",
        cut=None if names is None else hashlib.sha256(names.encode()).hexdigest(),
        schedules=tuple(baseline_names(problem)),
    )
