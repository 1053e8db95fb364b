"""Search a plan within every memory limit of a grid, and combine what the searches found.

A plan that was found for one limit also fits every larger one, so the best plan within a limit may come from
the search at a smaller limit. A lower bound that was proved for one limit also holds at every smaller one.

For a problem by layers, every limit has its own cut and its own recomputed stages. The memory of 1F1B
depends on the cut, so limits are then amounts of memory, equal on all ranks, instead of fractions. The
smallest limit is what the leanest cut needs with everything recomputed. At the largest limits, recomputation
no longer helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from zbv_solver.documents.files import number
from zbv_solver.errors import InvalidInput
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import Known, at_limit, best_within, grid, tightened
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import even_bound, level_cut
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.least_memory import least_memory_cut
from zbv_solver.plans.plan import Plan, certify, gap_of
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.problem.stages import Placement

Search = Callable[[AnyProblem], Plan]
LAYER_STEPS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Limits between the smallest one (0) and the need of 1F1B without recomputation (1)."""
LAYER_STEPS_BEYOND = (1.25, 1.5, 2.0)
"""Limits above that: the static memory of 1F1B and this multiple of its activations."""


@dataclass(frozen=True)
class FrontierPoint:
    """A memory limit, the best known plan that fits it, and a lower bound at this limit."""

    limit: float
    """The largest limit of any rank, in the problem's memory unit."""
    plan: Plan
    """Where layers are cut, the plan of any cut."""
    lower_bound: float
    needs: float
    """The smallest limit that the plan fits: a fraction of 1F1B's memory
    (:mod:`zbv_solver.frontiers.memory_fraction`), or for layers an amount of memory."""
    fraction: float | None = None
    """The limit as a fraction of 1F1B's memory; None for layers."""

    @property
    def gap(self) -> float:
        """objective / lower_bound - 1."""
        return gap_of(self.plan.objective, self.lower_bound)


class _Limited(NamedTuple):
    """A problem at a limit; ``place`` orders the limits, in the unit of :attr:`FrontierPoint.needs`."""

    place: float
    problem: AnyProblem


def frontier_points(
    problem: AnyProblem,
    search: Search,
    at: Callable[[int, int], None] = lambda number, of: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[FrontierPoint, ...]:
    """The best plan within every limit of the grid; the problem's own limit is ignored.

    Parameters
    ----------
    search
        Finds the plan of a problem; called once per limit, in ascending order.
    at
        Called before each search with the number of its limit, from 1, and how many limits there are.
    cancelled
        Asked between two searches; the points are then those of the limits so far.

    Raises
    ------
    InvalidInput
        When no stage or layer holds memory.
    ContradictedBound
        When a plan undercuts the bound of its limit or of a larger one.
    """
    limited = list(_limited(problem))
    plans: list[Plan] = []
    for limit in limited:
        if plans and cancelled():
            break
        at(len(plans) + 1, len(limited))
        plans.append(search(limit.problem))
    del limited[len(plans) :]
    needs = [_needs(problem, plan) for plan in plans]
    by_id = dict(zip((plan.plan_id for plan in plans), zip(plans, needs, strict=True), strict=True))
    known = [Known(plan.plan_id, need, plan.objective) for plan, need in zip(plans, needs, strict=True)]
    points = []
    bounds = tightened([_bound(problem, plan) for plan in plans])
    for (place, each), own, bound in zip(limited, known, bounds, strict=True):
        best = best_within(place, known) or own  # this limit's plan fits it, up to rounding
        plan, need = by_id[best.name]
        proven = certify(each, plan.objective, bound, "a larger limit's bound")
        limits = (each.limit if isinstance(each, LayeredProblem) else each.memory.limit) or (0.0,)
        fraction = place if isinstance(problem, Problem) else None
        points.append(FrontierPoint(max(limits), plan, proven.lower_bound, need, fraction))
    return tuple(points)


def _limited(problem: AnyProblem) -> Iterator[_Limited]:
    """The problem at every limit of its grid, ascending."""
    if isinstance(problem, LayeredProblem):
        yield from (_Limited(limit, at_limit(problem, limit)) for limit in layer_limits(problem))
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


def layer_limits(problem: LayeredProblem) -> tuple[float, ...]:
    """The limits to search, ascending; the first one is the smallest that is known to be feasible.

    Raises
    ------
    InvalidInput
        When no layer holds memory.
    """
    unlimited, placement = replace(problem, limit=None), problem.placements[0]
    space = CutSpace(unlimited, placement, CutTables.of(unlimited))
    # A cut with about even work, without recomputation.
    plain = unlimited.cut_into(placement, space.cut(level_cut(space), (False,) * placement.n_stages))
    activations = memory_fraction.one_f_one_b_memory(plain)
    if activations == 0:
        raise InvalidInput.at(
            "/layers",
            "no layer holds memory between its forward and its backward, so a limit has no effect. Give "
            "the layers' memory.forward, memory.backward_input and memory.backward_weight.",
        )
    least = smallest_limit(problem)
    static = max(plain.memory.static)
    most = static + activations
    above = [least + step * (most - least) for step in LAYER_STEPS] if most > least else []
    above += [static + step * activations for step in LAYER_STEPS_BEYOND]
    return (least, *(limit for limit in above if limit > least * (1 + MEMORY_TOLERANCE)))


def smallest_limit(problem: LayeredProblem) -> float:
    """The smallest limit that some cut is known to fit; the problem's own limit is ignored.

    Exact for placements V and single. For loop only a heuristic is known, so loop counts only if it is the
    only placement.
    """
    exact = [placement for placement in problem.placements if placement.kind != "loop"]
    return min(_smallest(problem, placement) for placement in exact or problem.placements)


def floor(problem: LayeredProblem) -> float:
    """A lower bound on the objective of every cut that fits the limit, on every placement.

    For V and single it uses the exact least load. If no cut fits, it is the bound without a limit.
    """
    relaxed = problem.relaxed
    tables = CutTables.of(relaxed)
    least = least_worst_load(relaxed, tables)
    worst = []
    for placement in problem.placements:
        if placement.kind == "loop":  # no exact minimum is known
            return problem.microbatches * least
        space = CutSpace(relaxed, placement, tables)
        balanced = even_bound(space, level_cut(space))
        if balanced is not None:
            worst.append(max(least, balanced.value))
    return problem.microbatches * min(worst, default=least)


def _smallest(problem: LayeredProblem, placement: Placement) -> float:
    """The least memory that the fullest rank needs in any cut on a placement."""
    # With the mean need as the limit no cut fits, so the excess over it is minimised.
    mean = float(CutTables.of(problem).sums[..., 3, -1].min()) / problem.pp_degree
    tight = at_limit(problem, max(problem.static) + mean)
    space = CutSpace(tight, placement, CutTables.of(tight))
    # Under loop, proving that the heuristic's cut is the smallest would take CP-SAT seconds.
    least = least_memory_cut(space, level_cut(space), enough=np.inf)
    return max(tight.cut_into(placement, least.cut).smallest_limit)
