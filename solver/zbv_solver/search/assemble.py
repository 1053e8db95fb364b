"""Verified plans of known orders, and the classical schedules as baselines.

A problem by stages keeps its stages in a classical schedule. For a problem by layers, every schedule gets the
best cut that a search finds for its own order, with the plan's memory limit and its freedom to recompute
stages.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from zbv_solver import bounds
from zbv_solver.construct.baselines import (
    baseline,
    baseline_names,
    order_of,
    placements_of,
    require_baseline,
    without_limit,
)
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Baseline, Metrics, Plan, Provenance, certify
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import uncut
from zbv_solver.problem.numeric import SEARCH_MEMORY, exceeds
from zbv_solver.problem.problem import B, I, Problem, W, objective_value
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_metrics, verify_orders

CACHED = 64
"""Cuts that are kept: a plan's page shows the schedules several times."""


def make_plan(
    problem: Problem,
    orders: Orders,
    *,
    method: str,
    lower_bound: float | None = None,
    source: str = "bounds",
    seed: int = 0,
    seconds: float = 0.0,
    extra: dict[str, Any] | None = None,
) -> Plan:
    """A verified plan from orders, without baselines.

    Parameters
    ----------
    lower_bound, source
        A proven bound on the objective, and where it comes from; None computes one.

    Raises
    ------
    InvalidPlan
        When the orders break a rule of the problem.
    ContradictedBound
        When the orders undercut the bound.
    """
    verified = verify_orders(problem, orders)
    timing = evaluate(problem, orders)
    bound = bounds.lower_bound(problem).value if lower_bound is None else lower_bound
    value = objective_value(problem.objective, timing)
    certificate = certify(problem, value, bound, source)
    metrics = Metrics(
        makespan=timing.makespan,
        span=timing.span,
        bubble_rate=timing.bubble_rate,
        peak_memory=timing.peak_memory,
        lower_bound=certificate.lower_bound,
        gap=certificate.gap,
        status=certificate.status,
    )
    plan = Plan(problem, orders, metrics, (), Provenance(method, seed, seconds, extra=extra or {}))
    verify_metrics(plan, verified)
    return plan


def without_useless_splits(problem: Problem, orders: Orders) -> Orders:
    """The orders with B for I and W in all stages where the split gains nothing: W takes no time, and B no
    longer than I.

    Neither objective grows: nothing on the rank waits for W, and a B ends no later than its I. Nor does
    memory: B frees at its end everything that I and W free. A rank then has one action less to launch.
    """
    duration = problem.arrays.duration
    is_useless = (duration[W] == 0) & (duration[B] <= duration[I])
    useless = is_useless[orders.stage, problem.arrays.kind_of[orders.microbatch]]
    kept = ~(useless & (orders.letter == W))
    letter = np.where(useless & (orders.letter == I), B, orders.letter)
    ranks = (orders.slice_of(rank) for rank in range(orders.pp_degree))
    rows = np.stack([orders.stage, letter, orders.microbatch], axis=1).astype(np.int32)
    return Orders.of_rows([rows[part][kept[part]] for part in ranks])


def classical(name: str, problem: Problem) -> tuple[Problem, Orders]:
    """The problem of a baseline, cut for its order if it has layers, and the order.

    Raises
    ------
    InvalidInput
        For a name that the problem's baselines do not have.
    """
    if problem.model is None or not problem.is_equal:
        return baseline(name, problem)
    require_baseline(name, problem)
    return _recut(name, problem)


@lru_cache(maxsize=CACHED)
def _recut(name: str, problem: Problem) -> tuple[Problem, Orders]:
    from zbv_solver.partition.descent import cut_for_order  # loads kernels that only layers need
    from zbv_solver.search.unit import OwnUnit

    found = []
    for placement in placements_of(name, problem):
        orders = order_of(name, placement, problem.microbatches)
        own = OwnUnit.of(uncut(problem, placement))
        cut = cut_for_order(own.problem, orders, _own_cut(problem, placement.n_stages))
        found.append((own.given.cut_into(placement, cut), orders))
    if len(found) == 1:
        return found[0]

    def rank(made: tuple[Problem, Orders]) -> tuple[bool, float]:
        timing = evaluate(without_limit(made[0]), made[1])
        return not fits(made[0], timing.peak_memory), objective_value(problem.objective, timing)

    return min(found, key=rank)


def stated(row: Baseline, problem: Problem) -> tuple[Problem, Orders]:
    """A baseline with the cut that it states, or as :func:`classical` if it states none.

    Raises
    ------
    InvalidPlan
        When its cut is not one of the problem's layers.
    """
    if problem.model is None or row.layers_per_stage is None:
        return classical(row.name, problem)
    bounds, layers = (0, *accumulate(row.layers_per_stage)), problem.model.model.n_layers
    stages = len(bounds) - 1
    recompute = row.recompute or (False,) * stages
    for placement in placements_of(row.name, problem):
        if placement.n_stages == stages == len(recompute) and bounds[-1] == layers:
            orders = order_of(row.name, placement, problem.microbatches)
            return uncut(problem, placement).cut_into(placement, Cut.at(bounds, recompute)), orders
    raise InvalidPlan(
        f"the stated cut of baseline {row.name} has {stages} stages with {bounds[-1]} layers, which the "
        f"schedule cannot have; the problem has {layers} layers on {problem.pp_degree} ranks."
    )


def _own_cut(problem: Problem, n_stages: int) -> list[Cut]:
    """The cut of the problem, with neighbouring stages merged, if that gives the number of stages."""
    if problem.model is None or problem.n_stages % n_stages:
        return []
    merged = problem.model.merged(problem.n_stages // n_stages)
    return [] if merged is None else [merged.cut]


def compare(problem: Problem) -> tuple[Baseline, ...]:
    """What the classical schedules achieve on a problem; every plan has them as ``plan.baselines``.

    They are GPipe, 1F1B, eager and interleaved 1F1B, ZB-H1, and those of a V: ZB-V, V-half, V-min and
    DualPipeV. If microbatches differ, also in the order used in practice (``-practice``), and DynaPipe's
    schedule. Only that one, and the cuts of layers, know the memory limit; :attr:`Baseline.fits` says which
    schedules keep it.
    """
    return tuple(baseline_row(name, *classical(name, problem)) for name in baseline_names(problem))


def baseline_row(name: str, problem: Problem, orders: Orders) -> Baseline:
    """A schedule of a problem as a baseline, with its cut if the problem has layers."""
    unlimited = without_limit(problem)
    verify_orders(unlimited, orders)
    timing = evaluate(unlimited, orders)
    model = problem.model
    return Baseline(
        name,
        timing.span,
        timing.makespan,
        timing.bubble_rate,
        timing.peak_memory,
        fits(problem, timing.peak_memory),
        None if model is None else tuple(len(stage) for stage in model.partition),
        None if model is None or not model.model.can_recompute else model.cut.recompute,
    )


def baseline_plan(name: str, problem: Problem) -> Plan:
    """A classical schedule of the same model as a verified plan, on the placement of that schedule.

    If the schedule exceeds the memory limit, the plan's problem has no limit, so that it can still be shown
    and run.
    """
    own_problem, orders = classical(name, problem)
    unlimited = without_limit(own_problem)
    peaks = evaluate(unlimited, orders).peak_memory
    return make_plan(own_problem if fits(own_problem, peaks) else unlimited, orders, method=name)


def fits(problem: Problem, peaks: tuple[float, ...]) -> bool:
    """Whether peaks of memory keep the limit of a problem."""
    limits = problem.memory.limit
    return limits is None or not any(
        exceeds(p, limit, SEARCH_MEMORY) for p, limit in zip(peaks, limits, strict=True)
    )
