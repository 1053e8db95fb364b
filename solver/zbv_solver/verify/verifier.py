"""An independent check of plans, which every plan passes before it leaves the library, command or service.

It deliberately shares no code with timing or search: every rule is a plain loop, the precedence graph is
sorted by Kahn's algorithm, and a stated span is checked against its definition instead of being computed
(:mod:`zbv_solver.verify.graph`). An undetected mistake would have to be made twice, in two different ways.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled_where_possible
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Metrics, Plan
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, SAME_METRIC
from zbv_solver.problem.problem import LETTERS, B, F, I, Problem, W
from zbv_solver.verify.graph import (
    PrecedenceGraph,
    amounts,
    by_action,
    columns,
    earliest,
    for_loops,
    precedence_graph,
    refuting_cycle,
)

_FINE, _OUT_OF_RANGE, _MISPLACED, _REPEATED, _MISSING, _EARLY = range(6)


class VerifiedOrders(NamedTuple):
    """Orders without a fault, and what their metrics are compared with."""

    peaks: list[float]
    """Peak memory of every rank (p,)."""
    graph: PrecedenceGraph


def verify_orders(problem: Problem, orders: Orders) -> VerifiedOrders:
    """Check completeness, placement, precedence, deadlock-freedom and memory.

    Raises :class:`InvalidPlan` with the broken rule, and the action and rank that break it.
    """
    where = _check_actions(problem, orders)
    peaks = _check_memory(problem, orders)
    return VerifiedOrders(peaks, precedence_graph(problem, orders, where))


def verify(plan: Plan) -> None:
    """Check the orders (:func:`verify_orders`), and compare stated metrics with recomputed ones.

    Raises :class:`InvalidPlan` with the broken rule, or with the stated and the recomputed value of a metric.
    """
    verify_metrics(plan, verify_orders(plan.problem, plan.orders))


def verify_metrics(plan: Plan, orders: VerifiedOrders) -> None:
    """Compare stated metrics with those of the plan's orders, which are verified already.

    Raises :class:`InvalidPlan` with the stated and the recomputed value of a metric.
    """
    p, metrics, graph = plan.problem.pp_degree, plan.metrics, orders.graph
    _check_finite(metrics)
    start = earliest(graph, np.zeros(p))
    compare("makespan", metrics.makespan, float(np.max(start + graph.duration) - np.min(start)))
    _check_span(graph, metrics.span, start[graph.first])
    busy = float(np.sum(graph.duration))
    bubble = 1 - busy / (p * metrics.span) if metrics.span > 0 else 0.0
    if abs(bubble - metrics.bubble_rate) > SAME_METRIC:
        raise InvalidPlan(f"the stated bubble_rate {metrics.bubble_rate:.9g} is {bubble:.9g} recomputed.")
    if len(metrics.peak_memory) != p:
        raise InvalidPlan(f"peak_memory states {len(metrics.peak_memory)} ranks, not {p}.")
    for rank, stated in enumerate(metrics.peak_memory):
        compare(f"peak_memory of rank {rank}", stated, orders.peaks[rank])
    _check_bound(plan)


def _check_finite(metrics: Metrics) -> None:
    """Reject NaN and infinities, because later comparisons could not refute them."""
    stated = {name: getattr(metrics, name) for name in ("makespan", "span", "bubble_rate", "lower_bound")}
    stated |= {f"peak_memory of rank {rank}": value for rank, value in enumerate(metrics.peak_memory)}
    for name, value in stated.items():
        if not math.isfinite(value):
            raise InvalidPlan(f"the stated {name} is {value}; it must be a finite number.")
    if math.isnan(metrics.gap):
        raise InvalidPlan("the stated gap is nan; it must be a number.")


def _check_span(graph: PrecedenceGraph, span: float, release: FloatArray) -> None:
    """Refute a span that is too small by a cycle of paths, and one that is too large by start times."""
    mean = refuting_cycle(graph, span * (1 + SAME_METRIC), release)
    if mean is not None:
        raise InvalidPlan(
            f"the stated span {span:.15g} is too small: paths of {mean:.15g} on average form a cycle "
            f"through the ranks."
        )
    if span > 0 and refuting_cycle(graph, span * (1 - SAME_METRIC), release) is None:
        raise InvalidPlan(f"the stated span {span:.15g} is too large: the order reaches less.")


def _check_bound(plan: Plan) -> None:
    value, metrics = plan.objective, plan.metrics
    if metrics.lower_bound > value * (1 + SAME_METRIC):
        raise InvalidPlan(
            f"the stated lower_bound {metrics.lower_bound:.15g} is above the objective {value:.15g}, so it "
            f"is no bound."
        )
    gap = value / metrics.lower_bound - 1 if metrics.lower_bound > 0 else math.inf if value > 0 else 0.0
    if gap != metrics.gap and not abs(gap - metrics.gap) <= SAME_METRIC:
        raise InvalidPlan(f"the stated gap {metrics.gap:.9g} is {gap:.9g} recomputed.")
    if metrics.status == "optimal" and gap > SAME_METRIC:
        raise InvalidPlan(f"the stated status is optimal at a gap of {gap:.3g}; optimal means a gap of 0.")


def compare(name: str, stated: float, recomputed: float) -> None:
    """Raise :class:`InvalidPlan` when a stated and a recomputed number differ by more than rounding."""
    if abs(stated - recomputed) > SAME_METRIC * max(abs(stated), abs(recomputed)):
        raise InvalidPlan(f"the stated {name} {stated:.15g} is {recomputed:.15g} recomputed.")


def _check_actions(problem: Problem, orders: Orders) -> IntArray:
    """Range, placement, completeness, and precedence inside a rank.

    Returns
    -------
    where
        (4 S m,): the index of letter k's action at ``4 * (stage * m + microbatch) + k``, or -1.
    """
    offset, m = orders.offset, problem.microbatches
    if orders.pp_degree != problem.pp_degree:
        raise InvalidPlan(f"found {orders.pp_degree} ranks; the problem has {problem.pp_degree}.")
    if offset[0] != 0 or offset[-1] != len(orders) or np.any(np.diff(offset) < 0):
        raise InvalidPlan("the ranks' lists overlap or miss actions; every action is in exactly one list.")
    rank_of = for_loops(np.array(problem.placement.rank_of))
    where = np.full(4 * problem.n_stages * m, -1, dtype=np.int32)
    rule, at = _locate(*columns(orders), offset, rank_of, m, where)
    if rule == _FINE:
        rule, at = _misses(for_loops(where))
    if rule != _FINE:
        raise InvalidPlan(_fault(problem, orders, rule, int(at)))
    return where


def _fault(problem: Problem, orders: Orders, rule: int, at: int) -> str:
    """Describe the fault of an action, or of a cell stage * m + microbatch without all its actions."""
    m = problem.microbatches
    if rule == _OUT_OF_RANGE:
        return (
            f"found {orders.text_at(at)}; stages are 0 to {problem.n_stages - 1} and microbatches 0 to "
            f"{m - 1}."
        )
    if rule == _MISPLACED:
        stage = orders.stage[at]
        return (
            f"found {orders.text_at(at)} on rank {orders.rank_index()[at]}; placement "
            f"{problem.placement.kind} puts stage {stage} on rank {problem.placement.rank_of[stage]}."
        )
    if rule == _EARLY:
        needed = "I" if orders.letter[at] == W else "F"
        needs = f"{orders.stage[at]}{needed}{orders.microbatch[at]}"
        return f"{orders.text_at(at)} comes before {needs} on its rank, but depends on it."
    stage, microbatch = divmod(at, m) if rule == _MISSING else (orders.stage[at], orders.microbatch[at])
    here = orders.letter[(orders.stage == stage) & (orders.microbatch == microbatch)]
    found = ", ".join(f"{np.count_nonzero(here == k)} {LETTERS[k]}" for k in range(4))
    return (
        f"stage {stage} microbatch {microbatch} has {found}; it must have one F, and either one B or "
        f"one I and one W."
    )


def _check_memory(problem: Problem, orders: Orders) -> list[float]:
    """Peak memory (p,); raises when it exceeds a limit."""
    memory = problem.memory
    forward, inputs = amounts(problem, "memory", "forward"), amounts(problem, "memory", "backward_input")
    # W releases what F and I leave. The stated deltas sum to 0 only up to rounding, and the rounding would
    # accumulate over many microbatches.
    left = np.maximum(forward + inputs, 0.0)
    tables = {F: forward, I: np.where(left > 0, inputs, -forward), W: -left, B: -forward}
    delta = by_action(orders, tables)
    static = np.array(memory.static, dtype=np.float64)
    peaks: list[float] = _highest(orders.offset, delta, static).tolist()
    for rank, limit in enumerate(memory.limit or ()):
        if peaks[rank] > limit + MEMORY_TOLERANCE * max(abs(peaks[rank]), abs(limit)):
            raise InvalidPlan(f"rank {rank} needs {peaks[rank]:.15g} of memory; its limit is {limit:.15g}.")
    return peaks


@compiled_where_possible
def _locate(
    stage: IntArray,
    letter: IntArray,
    microbatch: IntArray,
    offset: IntArray,
    rank_of: IntArray,
    m: int,
    where: IntArray,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Fill ``where``; returns the first action that is out of range, on a wrong rank, or repeated."""
    for rank in range(len(offset) - 1):
        for at in range(offset[rank], offset[rank + 1]):
            s, k, j = stage[at], letter[at], microbatch[at]
            if not (0 <= s < len(rank_of) and 0 <= k < 4 and 0 <= j < m):
                return _OUT_OF_RANGE, at
            if rank_of[s] != rank:
                return _MISPLACED, at
            slot = 4 * (s * m + j) + k
            if where[slot] >= 0:
                return _REPEATED, at
            where[slot] = at
    return _FINE, -1


@compiled_where_possible
def _misses(where: IntArray) -> tuple[int, int]:  # pragma: no cover - compiled
    """The first cell without F and either B or I and W, or the first action before one it depends on."""
    # A cell's actions are all on one rank (`_locate`), so comparing indices compares places in its list.
    for cell in range(len(where) // 4):
        forward, inputs = where[4 * cell + F], where[4 * cell + I]
        weights, fused = where[4 * cell + W], where[4 * cell + B]
        if forward < 0:
            return _MISSING, cell
        if fused >= 0:
            if inputs >= 0 or weights >= 0:
                return _MISSING, cell
            if fused < forward:
                return _EARLY, fused
        else:
            if inputs < 0 or weights < 0:
                return _MISSING, cell
            if inputs < forward:
                return _EARLY, inputs
            if weights < inputs:
                return _EARLY, weights
    return _FINE, -1


@compiled_where_possible
def _highest(
    offset: IntArray, delta: FloatArray, static: FloatArray
) -> FloatArray:  # pragma: no cover - compiled
    """Peak memory of every rank (p,): before, during and after all actions."""
    highest = static.copy()
    for rank in range(len(static)):
        held = static[rank]
        for at in range(offset[rank], offset[rank + 1]):
            # While an action runs, its rank holds the larger of the amounts before and after it. So it
            # suffices to look after every action.
            held += delta[at]
            if held > highest[rank]:
                highest[rank] = held
    return highest
