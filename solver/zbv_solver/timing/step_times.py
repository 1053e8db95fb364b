"""How long the iterations of an order take when durations vary (:mod:`zbv_solver.problem.jitter`).

The order is fixed and the times are not. A rank runs its list in order, and begins an action as soon as its
previous action has ended and its inputs have arrived, like an executor that waits only for data.

**Span.** Iterations follow each other back to back, with other durations in each, and no rank waits for
another one in between. Iteration k takes E[k] - E[k - 1], where E[k] is the last end of iteration k on any
rank. Without jitter, these times converge to the exact span. ``zbv-worker rehearse`` measures the same.

**Makespan.** All ranks begin an iteration together, and it takes until its last end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.jit import FloatArray, IntArray, compiled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.jitter import Draws, Jitter, action_rows, draw
from zbv_solver.problem.problem import F, Problem
from zbv_solver.timing.start_times import Graph, execute, span_start_times

CHAINS = 16
"""Chains of iterations that are simulated; an iteration of each is a scenario."""
WARM_UP = 2
"""Iterations at the beginning of a chain that do not count. A chain starts as the exact span does, so few
suffice."""
MAX_SCENARIOS = 100_000
_LANES_ACTIONS = 1 << 21
"""Chains are simulated together as long as their actions together are at most this many."""


@dataclass(frozen=True, eq=False)
class IterationTimes:
    """Times of iterations, (scenarios,) each, in the problem's time unit."""

    span: FloatArray
    makespan: FloatArray


def iteration_times(
    problem: Problem,
    orders: Orders,
    jitter: Jitter,
    *,
    scenarios: int,
    seed: int,
    check: Callable[[], None] = lambda: None,
) -> IterationTimes:
    """Simulate the iterations of an order.

    Parameters
    ----------
    check
        Called before every iteration of some chains; the simulation ends with what it raises.

    Raises
    ------
    InvalidInput
        When ``scenarios`` is out of range, or the jitter is for another number of ranks.
    InvalidPlan
        When the order deadlocks.
    """
    if not 1 <= scenarios <= MAX_SCENARIOS:
        raise InvalidInput.at(
            "/scenarios", f"found {scenarios}; must be an integer from 1 to {MAX_SCENARIOS}."
        )
    graph = execute(problem, orders)[0]
    rows, inputs = _rows_of_draws(problem, orders)
    first = span_start_times(problem, orders)[np.minimum(orders.offset[:-1], len(orders) - 1)]
    together = max(1, min(CHAINS, _LANES_ACTIONS // max(1, len(orders))))
    length = -(-scenarios // CHAINS)
    spans, makespans = [], []
    for begin in range(0, CHAINS, together):
        chains = range(begin, min(begin + together, CHAINS))
        end = np.empty((len(orders), len(chains)))
        ready = np.repeat(first[:, None], len(chains), axis=1)
        for iteration in range(WARM_UP + length):
            check()
            draws = draw(jitter, problem, seed, chains, iteration)
            before = ready.max(axis=0)
            _run(graph, rows, inputs, draws, ready, end)
            if iteration >= WARM_UP:
                spans.append(ready.max(axis=0) - before)
                alone = np.zeros_like(ready)
                _run(graph, rows, inputs, draws, alone, end)
                makespans.append(alone.max(axis=0))
    return IterationTimes(np.concatenate(spans)[:scenarios], np.concatenate(makespans)[:scenarios])


def rehearsed_times(
    problem: Problem, orders: Orders, jitter: Jitter, *, iterations: int, seed: int
) -> IterationTimes:
    """Simulate the first iterations of the first chain, if all ranks begin the first one together.

    That is how ranks begin that run the order; ``zbv-worker rehearse`` compares itself with these times.

    Raises
    ------
    InvalidInput
        When the jitter is for another number of ranks.
    InvalidPlan
        When the order deadlocks.
    """
    graph = execute(problem, orders)[0]
    rows, inputs = _rows_of_draws(problem, orders)
    ready, end = np.zeros((problem.pp_degree, 1)), np.empty((len(orders), 1))
    spans, makespans = np.empty(iterations), np.empty(iterations)
    for iteration in range(iterations):
        draws = draw(jitter, problem, seed, (0,), iteration)
        before, alone = ready.max(), np.zeros_like(ready)
        _run(graph, rows, inputs, draws, ready, end)
        _run(graph, rows, inputs, draws, alone, end)
        spans[iteration], makespans[iteration] = ready.max() - before, alone.max()
    return IterationTimes(spans, makespans)


def _rows_of_draws(problem: Problem, orders: Orders) -> tuple[IntArray, IntArray]:
    """The rows (n,) of actions in ``Draws.action``, and of their inputs in ``Draws.transfer``."""
    rows = action_rows(orders.stage, orders.letter, orders.microbatch, problem)
    cells = problem.n_stages * problem.microbatches
    # F takes its input from the transfers that go down the pipeline, I and B from those that go up.
    return rows, rows % cells + np.where(orders.letter == F, 0, cells)


@compiled
def _run(
    graph: Graph, rows: IntArray, inputs: IntArray, draws: Draws, ready: FloatArray, end: FloatArray
) -> None:  # pragma: no cover - compiled
    """Run one iteration in L chains.

    ``ready`` (p, L) holds when every rank may begin, and afterwards when it has ended. ``rows`` and
    ``inputs`` (n,) are the rows of an action in ``draws.action``, and of its input in ``draws.transfer``.
    ``end`` (n, L) is written.
    """
    source, offset, runs = graph.source, graph.offset, graph.runs
    chains = end.shape[1]
    reached = offset[:-1].copy()
    # The chains are the innermost index, so that the processor computes several at once.
    for k in range(len(runs)):
        rank, stop = runs[k]
        for at in range(reached[rank], stop):
            feed, own, shared = source[at], draws.action[rows[at]], draws.rank[rank]
            duration, clock, ends = graph.duration[at], ready[rank], end[at]
            if feed >= 0:
                sent, factor, latency = end[feed], draws.transfer[inputs[at]], graph.latency[at]
                for chain in range(chains):
                    arrival = sent[chain] + latency * factor[chain]
                    start = clock[chain] if clock[chain] > arrival else arrival
                    ends[chain] = start + duration * own[chain] * shared[chain]
            else:
                for chain in range(chains):
                    ends[chain] = clock[chain] + duration * own[chain] * shared[chain]
            for chain in range(chains):
                clock[chain] = ends[chain]
        reached[rank] = stop
