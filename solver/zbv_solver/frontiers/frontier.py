"""Search a plan within every memory limit of a grid, and combine what the searches found.

A plan that was found for one limit also fits every larger one, so the best plan within a limit may come from
the search at a smaller limit. A lower bound that was proved for one limit also holds at every smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from zbv_solver.documents.text import number
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.by_layers import limits
from zbv_solver.frontiers.limits import Known, at_limit, best_within, grid, tightened
from zbv_solver.plans.certificate import certify, gap_of
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem, objective_value

Search = Callable[[AnyProblem], Plan]


@dataclass(frozen=True)
class FrontierPoint:
    """A memory limit, the best known plan that fits it, and a lower bound at this limit.

    Attributes
    ----------
    limit
        The largest limit of any rank, in the problem's memory unit.
    plan
        Where layers are cut, the plan of any cut.
    needs
        The smallest limit that the plan fits: a fraction of 1F1B's memory
        (:mod:`zbv_solver.frontiers.memory_fraction`), or for layers an amount of memory.
    fraction
        The limit as a fraction of 1F1B's memory; None for layers.
    """

    limit: float
    plan: Plan
    lower_bound: float
    needs: float
    fraction: float | None = None

    @property
    def gap(self) -> float:
        """objective / lower_bound - 1."""
        return gap_of(self.plan.objective, self.lower_bound)


class _Limited(NamedTuple):
    """A problem at a limit; ``place`` orders the limits, in the unit of :attr:`FrontierPoint.needs`."""

    place: float
    problem: AnyProblem


def frontier_points(problem: AnyProblem, search: Search) -> tuple[FrontierPoint, ...]:
    """The best plan within every limit of the grid; the problem's own limit is ignored.

    Parameters
    ----------
    search
        Finds the plan of a problem; called once per limit, in ascending order.

    Raises
    ------
    InvalidInput
        When no stage or layer holds memory.
    ContradictedBound
        When a plan undercuts the bound of its limit or of a larger one.
    """
    limited = list(_limited(problem))
    plans = [search(each.problem) for each in limited]
    needs = [_needs(problem, plan) for plan in plans]
    by_id = dict(zip((plan.plan_id for plan in plans), zip(plans, needs, strict=True), strict=True))
    known = [Known(plan.plan_id, need, plan.objective) for plan, need in zip(plans, needs, strict=True)]
    points = []
    bounds = tightened([_bound(problem, plan) for plan in plans])
    for (place, each), own, bound in zip(limited, known, bounds, strict=True):
        best = best_within(place, known) or own  # this limit's plan fits it, up to rounding
        plan, need = by_id[best.name]
        proven = certify(each, plan.objective, bound, "a larger limit's bound")
        fraction = place if isinstance(problem, Problem) else None
        points.append(FrontierPoint(_largest_limit(each), plan, proven.lower_bound, need, fraction))
    return tuple(points)


def _limited(problem: AnyProblem) -> Iterator[_Limited]:
    """The problem at every limit of its grid, ascending."""
    if isinstance(problem, LayeredProblem):
        yield from (_Limited(limit, at_limit(problem, limit)) for limit in limits(problem))
    else:
        for fraction in grid(problem):
            yield _Limited(fraction, memory_fraction.at_fraction(problem, fraction))


def _needs(problem: AnyProblem, plan: Plan) -> float:
    peaks = plan.metrics.peak_memory
    return max(peaks) if isinstance(problem, LayeredProblem) else memory_fraction.needed(problem, peaks)


def _bound(problem: AnyProblem, plan: Plan) -> float:
    """What the search proved: for layers, about every cut."""
    if isinstance(problem, LayeredProblem):
        return 0.0 if plan.cut is None else plan.cut.lower_bound
    return plan.metrics.lower_bound


def _largest_limit(problem: AnyProblem) -> float:
    limit = problem.limit if isinstance(problem, LayeredProblem) else problem.memory.limit
    return max(limit or (0.0,))


def baseline_points(plan: Plan) -> Iterator[Known]:
    """The classical schedules of a plan's problem; `needs` is a fraction of 1F1B's memory."""
    for baseline in plan.baselines:
        needs = memory_fraction.needed(plan.problem, baseline.peak_memory)
        yield Known(baseline.name, needs, objective_value(plan.problem.objective, baseline))


def recomputed_stages(plan: Plan) -> int:
    """Number of stages that are recomputed."""
    model = plan.problem.model
    return 0 if model is None else sum(model.cut.recompute)


def point_json(point: FrontierPoint) -> dict[str, Any]:
    """A point as a JSON document."""
    plan, problem = point.plan, point.plan.problem
    document: dict[str, Any] = {} if point.fraction is None else {"fraction": number(point.fraction)}
    document |= {
        "limit": number(point.limit),
        "objective": number(plan.objective),
        "lower_bound": number(point.lower_bound),
        "gap": point.gap,
        "plan_id": plan.plan_id,
    }
    if point.fraction is not None:
        return {**document, "needs": point.needs}
    return {
        **document,
        "peak_memory": number(point.needs),
        "placement": problem.placement.kind,
        "chunks": problem.placement.chunks,
        "recomputed": recomputed_stages(plan),
    }
