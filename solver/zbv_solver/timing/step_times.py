"""How long the iterations of an order take when durations vary (:mod:`zbv_solver.problem.jitter`).

The order is fixed and the times are not. A rank runs its list in order, and begins an action as soon as its
previous action has ended and its inputs have arrived, like an executor that waits only for data.

**Span.** Iterations follow each other back to back, with other durations in each, and no rank waits for
another one in between. Iteration k takes E[k] - E[k - 1], where E[k] is the last end of iteration k on any
rank. Without jitter, these times converge to the exact span. ``zbv-worker rehearse`` measures the same.

**Makespan.** All ranks begin an iteration together, and it takes until its last end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.jit import FloatArray, compiled
from zbv_solver.plans.orders import Orders, durations
from zbv_solver.problem.jitter import Jitter, draw, drawn_costs
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
    first = span_start_times(problem, orders)[np.minimum(orders.offset[:-1], len(orders) - 1)]
    together = max(1, min(CHAINS, _LANES_ACTIONS // max(1, len(orders))))
    length = -(-scenarios // CHAINS)
    spans, makespans = [], []
    for begin in range(0, CHAINS, together):
        chains = range(begin, min(begin + together, CHAINS))
        ready = np.repeat(first[:, None], len(chains), axis=1)
        for span, makespan in _iterations(
            problem, orders, jitter, seed, chains, ready, (WARM_UP, WARM_UP + length), check
        ):
            spans.append(span)
            makespans.append(makespan)
    return IterationTimes(np.concatenate(spans)[:scenarios], np.concatenate(makespans)[:scenarios])


def _iterations(
    problem: Problem,
    orders: Orders,
    jitter: Jitter,
    seed: int,
    chains: range,
    ready: FloatArray,
    counted: tuple[int, int],
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Span and makespan (L,) of the counted iterations of L chains, whose ranks begin at ``ready`` (p, L)."""
    graph = execute(problem, orders)
    end = np.empty((len(orders), len(chains)))
    # F takes its input from the transfers that go down the pipeline, I and B from those that go up.
    way = np.where(orders.letter == F, 0, 1)
    for iteration in range(counted[1]):
        check()
        drawn, latencies = drawn_costs(problem, draw(jitter, problem, seed, chains, iteration))
        duration = durations(problem, orders, drawn[orders.letter, orders.stage, orders.microbatch])
        latency = latencies[way, orders.stage, orders.microbatch]
        before, alone = ready.max(axis=0), np.zeros_like(ready)
        _run(graph, duration, latency, ready, end)
        if iteration >= counted[0]:
            _run(graph, duration, latency, alone, end)
            yield ready.max(axis=0) - before, alone.max(axis=0)


@compiled
def _run(
    graph: Graph, duration: FloatArray, latency: FloatArray, ready: FloatArray, end: FloatArray
) -> None:  # pragma: no cover - compiled
    """Run one iteration in L chains.

    ``duration`` and ``latency`` (n, L) are those of actions and of their inputs. ``ready`` (p, L) holds when
    every rank may begin, and afterwards when it has ended. ``end`` (n, L) is written.
    """
    source, runs, reached = graph.source, graph.runs, graph.offset[:-1].copy()
    # The chains are the innermost index, so that the processor computes several at once.
    for k in range(len(runs)):
        rank, stop = runs[k]
        clock = ready[rank]
        for at in range(reached[rank], stop):
            feed, takes, ends = source[at], duration[at], end[at]
            if feed >= 0:
                sent, transfer = end[feed], latency[at]
                for chain in range(len(clock)):
                    arrival = sent[chain] + transfer[chain]
                    ends[chain] = max(clock[chain], arrival) + takes[chain]
            else:
                for chain in range(len(clock)):
                    ends[chain] = clock[chain] + takes[chain]
            for chain in range(len(clock)):
                clock[chain] = ends[chain]
        reached[rank] = stop
