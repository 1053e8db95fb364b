"""Start and end times of actions, and the metrics of an order; docs/formats.md defines them.

One pass executes the order, or finds a deadlock. It yields earliest times, and the *runs* of the execution:
consecutive actions of one rank that execute without waiting for another rank's progress. Every further
longest-path problem is then a linear sweep over the runs (kernels: :mod:`zbv_solver.timing.sweeps`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import B, F, I, Problem, objective_value
from zbv_solver.timing import sweeps
from zbv_solver.timing.sweeps import Graph


@dataclass(frozen=True, eq=False)
class Timing:
    """Earliest times and metrics of an order."""

    start: FloatArray
    end: FloatArray
    """(n,) starts and ends in the flat order of the :class:`Orders`, in the problem's time unit."""
    makespan: float
    """Last end, with t = 0 at the first start."""
    span: float
    """Exact steady-state time of one iteration."""
    bubble_rate: float
    """1 - busy time / (p * span)."""
    peak_memory: tuple[float, ...]
    """Per rank (p,), static memory included."""


@dataclass(frozen=True, eq=False)
class _Executed:
    """An order as it executes at earliest start; ``start`` and ``end`` are (n,)."""

    graph: Graph
    start: FloatArray
    end: FloatArray


def evaluate(problem: Problem, orders: Orders) -> Timing:
    """Earliest-start times and metrics of an order.

    Raises :class:`InvalidPlan` when the order deadlocks, or the input of an action is not produced before it.
    """
    executed = _execute_orders(problem, orders)
    span = _exact_span(executed, orders)[0]
    busy = float(executed.graph.duration.sum())
    arrays = problem.arrays
    delta = arrays.deltas(orders.stage, orders.letter, orders.microbatch)
    return Timing(
        start=executed.start,
        end=executed.end,
        makespan=_makespan(executed, orders),
        span=span,
        bubble_rate=max(0.0, 1 - busy / (problem.pp_degree * span)) if span > 0 else 0.0,
        peak_memory=tuple(sweeps.peaks(orders.offset, delta, arrays.static).tolist()),
    )


def objective_of(problem: Problem, orders: Orders) -> float:
    """The objective of an order: its exact span, or its makespan.

    Raises :class:`InvalidPlan` when the orders deadlock.
    """
    return objective_value(problem.objective, evaluate(problem, orders))


def earliest_times(problem: Problem, orders: Orders) -> tuple[FloatArray, FloatArray]:
    """Earliest start and end of every action, each (n,), without the exact span.

    Raises :class:`InvalidPlan` like :func:`evaluate`.
    """
    executed = _execute_orders(problem, orders)
    return executed.start, executed.end


def earliest_start_values(problem: Problem, orders: Orders) -> tuple[float, float]:
    """Makespan, and the largest (last end - first start) of any rank at earliest times.

    The second number is an upper bound on the span. This is much cheaper than :func:`evaluate`.

    Raises :class:`InvalidPlan` like :func:`evaluate`.
    """
    executed = _execute_orders(problem, orders)
    first, last = _ends_of_ranks(orders)
    window = executed.end[last] - executed.start[first]
    return _makespan(executed, orders), float(window.max(initial=0.0))


def execution_graph(problem: Problem, orders: Orders) -> Graph:
    """An order as it executes, for longest paths; raises :class:`InvalidPlan` like :func:`evaluate`."""
    return _execute_orders(problem, orders).graph


def span_start_times(problem: Problem, orders: Orders) -> FloatArray:
    """Start times (n,) with which every rank finishes within the exact span.

    The first starts x solve x[q] >= x[r] + D[r][q] - span, a system without positive cycles. All other
    actions then start as early as possible.
    """
    executed = _execute_orders(problem, orders)
    _, release = _exact_span(executed, orders)
    origin, length = np.empty(len(orders), np.int32), np.empty(len(orders))
    sweeps.sweep(executed.graph, release, origin, length)
    start: FloatArray = release[origin] + length - executed.graph.duration
    return start - start.min(initial=np.inf) if len(start) else start


def memory_profile(problem: Problem, orders: Orders) -> tuple[FloatArray, FloatArray]:
    """Memory of an action's rank while the action runs and after it has ended, each (n,).

    For a given order this does not depend on times: it is a prefix sum per rank.
    """
    arrays = problem.arrays
    delta = arrays.deltas(orders.stage, orders.letter, orders.microbatch)
    after = np.empty(len(orders))
    for rank in range(orders.pp_degree):
        part = orders.slice_of(rank)
        after[part] = arrays.static[rank] + np.cumsum(delta[part])
    before = after - delta
    return before + np.maximum(delta, 0.0), after


def _ends_of_ranks(orders: Orders) -> tuple[IntArray, IntArray]:
    """First and last action of every rank that has actions."""
    filled = np.diff(orders.offset) > 0
    return orders.offset[:-1][filled], orders.offset[1:][filled] - 1


def _makespan(executed: _Executed, orders: Orders) -> float:
    first, last = _ends_of_ranks(orders)
    return float(executed.end[last].max() - executed.start[first].min()) if len(first) else 0.0


def _execute_orders(problem: Problem, orders: Orders) -> _Executed:
    n_stages, m = problem.n_stages, problem.microbatches
    if orders.pp_degree != problem.pp_degree:
        raise InvalidPlan(f"found {orders.pp_degree} ranks; the problem has {problem.pp_degree}.")
    for names, amount in ((orders.stage, n_stages), (orders.microbatch, m)):
        if names.min(initial=0) < 0 or names.max(initial=0) >= amount:
            at = int(np.argmax((names < 0) | (names >= amount)))
            raise InvalidPlan(
                f"found {orders.text_at(at)}; the problem has {n_stages} stages and {m} microbatches."
            )
    arrays = problem.arrays
    duration = arrays.durations(orders.stage, orders.letter, orders.microbatch)
    waits = np.full((4, n_stages, arrays.kinds), -1.0)
    # F receives over the boundary before its stage, I and B over the one after it. The others have no remote
    # input: -1.
    waits[F, 1:] = waits[I, :-1] = waits[B, :-1] = arrays.latency
    latency = waits[orders.letter, orders.stage, arrays.kind_of[orders.microbatch]]
    row = orders.letter * np.int32(n_stages) + orders.stage
    cell = orders.stage * np.int32(m) + orders.microbatch
    start, end, source, runs, reached = sweeps.execute(
        row, cell, orders.offset, duration, latency, n_stages, m
    )
    if (reached < orders.offset[1:]).any():
        raise InvalidPlan(_deadlock_message(orders, reached))
    graph = Graph(source, orders.offset, duration, latency, runs)
    return _Executed(graph, start, end)


def _deadlock_message(orders: Orders, reached: IntArray) -> str:
    stuck = [
        f"rank {rank} at {orders.text_at(at)}"
        for rank, at in enumerate(reached.tolist())
        if at < orders.offset[rank + 1]
    ]
    shown = ", ".join(stuck[:6]) + (", …" if len(stuck) > 6 else "")
    return f"the order deadlocks: every rank waits for an input that nobody will produce ({shown})."


def _exact_span(executed: _Executed, orders: Orders) -> tuple[float, FloatArray]:
    """The span, and first starts of the ranks (p,) with which every rank finishes within it."""
    release = np.zeros(orders.pp_degree)
    filled = np.diff(orders.offset) > 0
    # If no rank gains from starting later, the earliest starts are the solution.
    release[filled] = executed.start[orders.offset[:-1][filled]]
    span = sweeps.policy_iteration(executed.graph, release, ROUNDING)
    return float(span), release
