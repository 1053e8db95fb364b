"""Searching the frontier of a problem: a plan within every limit of the grid, beside 1F1B and its kin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zbv_solver.documents.text import number
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import Known, best_within, grid, tightened
from zbv_solver.plans.certificate import certify, gap_of
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem

Search = Callable[[Problem], Plan]


@dataclass(frozen=True)
class FrontierPoint:
    """A limit: its fraction of 1F1B's memory, the best plan that fits, and a bound that holds there.

    Attributes
    ----------
    limit
        The largest of any rank, in the problem's memory unit.
    """

    fraction: float
    limit: float
    best: Known
    lower_bound: float

    @property
    def gap(self) -> float:
        """By which share the best plan may be above the optimum."""
        return gap_of(self.best.value, self.lower_bound)


def frontier_points(problem: Problem, search: Search) -> tuple[FrontierPoint, ...]:
    """The best objective within every limit of the grid, each searched with ``search``.

    Raises
    ------
    InvalidInput
        When the problem says nothing about memory.
    ContradictedBound
        When a plan undercuts the bound of its own limit or of a larger one.
    """
    fractions = grid(problem)
    limited = [memory_fraction.at_fraction(problem, fraction) for fraction in fractions]
    plans = [search(each) for each in limited]
    known = [
        Known(plan.plan_id, memory_fraction.needed(problem, plan.metrics.peak_memory), plan.objective)
        for plan in plans
    ]
    bounds = tightened([plan.metrics.lower_bound for plan in plans])
    points = []
    for fraction, each, own, bound in zip(fractions, limited, known, bounds, strict=True):
        best = best_within(fraction, known) or own  # its own plan fits, if only to rounding
        proven = certify(each, best.value, bound, "a larger limit's bound")
        points.append(FrontierPoint(fraction, max(each.memory.limit or (0.0,)), best, proven.lower_bound))
    return tuple(points)


def baseline_points(plan: Plan) -> Iterator[Known]:
    """The classical schedules of a plan's problem: what they need, and their objective."""
    for baseline in plan.baselines:
        needs = memory_fraction.needed(plan.problem, baseline.peak_memory)
        yield Known(baseline.name, needs, getattr(baseline, plan.problem.objective))


def point_json(point: FrontierPoint) -> dict[str, Any]:
    """A point as JSON takes it."""
    return {
        "fraction": number(point.fraction),
        "limit": number(point.limit),
        "objective": number(point.best.value),
        "lower_bound": number(point.lower_bound),
        "gap": point.gap,
        "plan_id": point.best.name,
        "needs": point.best.needs,
    }
