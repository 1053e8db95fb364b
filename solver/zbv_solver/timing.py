"""When every action starts and ends under an order, and what the order achieves.

Kernels are numba on flat arrays. One pass finds a topological order of the actions (or a deadlock); each
longest-path question is then a linear sweep along it. Definitions: docs/formats.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidPlan
from zbv_solver.jit import compiled
from zbv_solver.orders import Action, Orders
from zbv_solver.problem import LETTERS, Problem

if TYPE_CHECKING:
    pass

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]

_NO_PATH = -1e300


@dataclass(frozen=True, eq=False)
class Timing:
    """An order's earliest-start times and metrics.

    Attributes
    ----------
    start, end
        (n,) float64 in the flat order of the :class:`Orders`, in the problem's time unit.
    makespan
        Last end, with t = 0 at the first start.
    span
        Exact steady-state time of one iteration.
    bubble_rate
        1 - busy time / (p * span).
    peak_memory
        Per rank (p,), static memory included.
    """

    start: FloatArray
    end: FloatArray
    makespan: float
    span: float
    bubble_rate: float
    peak_memory: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class _Graph:
    """An order's precedence graph: every action has at most a rank predecessor and one remote input."""

    topological: IntArray
    source: IntArray
    duration: FloatArray
    delay: FloatArray


def evaluate(problem: Problem, orders: Orders) -> Timing:
    """Earliest-start times and metrics of an order.

    Raises
    ------
    InvalidPlan
        When the order deadlocks, or an action's input is produced nowhere before it.
    """
    graph = _graph(problem, orders)
    start, end = _earliest(graph.topological, orders.offset, graph.source, graph.duration, graph.delay)
    span = _exact_span(graph, orders)
    busy = float(graph.duration.sum())
    during, _ = memory_profile(problem, orders)
    return Timing(
        start=start,
        end=end,
        makespan=float(end.max(initial=0.0) - start.min(initial=np.inf)) if len(orders) else 0.0,
        span=span,
        bubble_rate=1 - busy / (problem.pp_degree * span) if span > 0 else 0.0,
        peak_memory=_peaks(problem, orders, during),
    )


def earliest_times(problem: Problem, orders: Orders) -> tuple[FloatArray, FloatArray]:
    """Earliest start and end of every action, each (n,): what drawing needs, without the exact span.

    Raises
    ------
    InvalidPlan
        As :func:`evaluate`.
    """
    graph = _graph(problem, orders)
    start, end = _earliest(graph.topological, orders.offset, graph.source, graph.duration, graph.delay)
    return start, end


def earliest_start_span(problem: Problem, orders: Orders) -> float:
    """Largest (last end - first start) over the ranks at earliest start: an upper bound of the span."""
    start, end = earliest_times(problem, orders)
    first, last = orders.offset[:-1], orders.offset[1:] - 1
    return float((end[last] - start[first]).max())


def span_start_times(problem: Problem, orders: Orders) -> FloatArray:
    """Start times (n,) under which every rank's window fits the exact span.

    The first starts x solve x[q] >= x[r] + D[r][q] - span, a system without positive cycles; every other
    action then starts as early as its rank's first start allows.
    """
    graph = _graph(problem, orders)
    reach = _reach(graph.topological, orders.offset, graph.source, graph.duration, graph.delay)
    span = float(_max_cycle_mean(reach))
    release = _potentials(reach, span)
    start, _ = _released(graph.topological, orders.offset, graph.source, graph.duration, graph.delay, release)
    return start - start.min(initial=np.inf) if len(start) else start


def memory_profile(problem: Problem, orders: Orders) -> tuple[FloatArray, FloatArray]:
    """Memory held by an action's rank while the action runs and after it has ended, each (n,).

    Independent of time: for a fixed order it is a prefix sum per rank.
    """
    arrays = problem.arrays
    delta = arrays.delta[orders.letter, orders.stage]
    after = np.empty(len(orders))
    for rank in range(orders.pp_degree):
        part = orders.slice_of(rank)
        after[part] = arrays.static[rank] + np.cumsum(delta[part])
    before = after - delta
    return before + np.maximum(delta, 0.0), after


def _peaks(problem: Problem, orders: Orders, during: FloatArray) -> tuple[float, ...]:
    return tuple(
        max(static, float(during[orders.slice_of(rank)].max(initial=0.0)))
        for rank, static in enumerate(problem.memory.static)
    )


def _graph(problem: Problem, orders: Orders) -> _Graph:
    arrays = problem.arrays
    if orders.pp_degree != problem.pp_degree:
        raise InvalidPlan(f"found {orders.pp_degree} ranks; the problem has {problem.pp_degree}.")
    if len(orders) and (
        orders.stage.max() >= problem.n_stages or orders.microbatch.max() >= problem.microbatches
    ):
        raise InvalidPlan(
            f"an action names stage {orders.stage.max()} or microbatch {orders.microbatch.max()}; "
            f"the problem has {problem.n_stages} stages and {problem.microbatches} microbatches."
        )
    topological, source, done = _topological(
        orders.stage, orders.letter, orders.microbatch, orders.offset, problem.n_stages, problem.microbatches
    )
    if done < len(orders):
        raise InvalidPlan(_deadlock_message(orders, topological[:done]))
    boundary = np.where(
        orders.letter == 0, np.maximum(orders.stage - 1, 0), np.minimum(orders.stage, problem.n_stages - 2)
    )
    transfer = arrays.transfer if problem.n_stages > 1 else np.zeros(1)
    delay = np.where(source >= 0, transfer[boundary], 0.0)
    return _Graph(topological, source, arrays.duration[orders.letter, orders.stage], delay)


def _deadlock_message(orders: Orders, done: IntArray) -> str:
    executed = np.zeros(len(orders), dtype=bool)
    executed[done] = True
    stuck = []
    for rank in range(orders.pp_degree):
        waiting = np.flatnonzero(~executed[orders.slice_of(rank)])
        if len(waiting):
            at = orders.slice_of(rank).start + int(waiting[0])
            stuck.append(f"rank {rank} at {_action_at(orders, at)}")
    shown = ", ".join(stuck[:6]) + (", …" if len(stuck) > 6 else "")
    return f"the order deadlocks: every rank waits for an input that nobody will produce ({shown})."


def _action_at(orders: Orders, index: int) -> Action:
    return Action(int(orders.stage[index]), LETTERS[int(orders.letter[index])], int(orders.microbatch[index]))


def _exact_span(graph: _Graph, orders: Orders) -> float:
    if not len(orders):
        return 0.0
    reach = _reach(graph.topological, orders.offset, graph.source, graph.duration, graph.delay)
    return float(_max_cycle_mean(reach))


@compiled
def _topological(
    stage: IntArray, letter: IntArray, microbatch: IntArray, offset: IntArray, n_stages: int, m: int
) -> tuple[IntArray, IntArray, int]:  # pragma: no cover - compiled
    """Actions in an executable order, every action's remote input (or -1), and how many can execute."""
    n, p = len(stage), len(offset) - 1
    forward_at = np.full(n_stages * m, -1, np.int64)
    backward_at = np.full(n_stages * m, -1, np.int64)
    topological = np.empty(n, np.int64)
    source = np.full(n, -1, np.int64)
    cursor = offset[:-1].copy()
    done, progress = 0, True
    while progress:
        progress = False
        for rank in range(p):
            at = cursor[rank]
            while at < offset[rank + 1]:
                cell = stage[at] * m + microbatch[at]
                kind = letter[at]
                if kind == 0:
                    if stage[at] > 0:
                        source[at] = forward_at[cell - m]
                        if source[at] < 0:
                            break
                    forward_at[cell] = at
                elif kind == 2:
                    if backward_at[cell] < 0:
                        break
                else:
                    if forward_at[cell] < 0:
                        break
                    if stage[at] < n_stages - 1:
                        source[at] = backward_at[cell + m]
                        if source[at] < 0:
                            break
                    backward_at[cell] = at
                topological[done] = at
                done += 1
                at += 1
                progress = True
            cursor[rank] = at
    return topological, source, done


@compiled
def _earliest(
    topological: IntArray, offset: IntArray, source: IntArray, duration: FloatArray, delay: FloatArray
) -> tuple[FloatArray, FloatArray]:  # pragma: no cover - compiled
    return _released(topological, offset, source, duration, delay, np.zeros(len(offset) - 1))


@compiled
def _released(
    topological: IntArray,
    offset: IntArray,
    source: IntArray,
    duration: FloatArray,
    delay: FloatArray,
    release: FloatArray,
) -> tuple[FloatArray, FloatArray]:  # pragma: no cover - compiled
    """Earliest starts when rank r may not start before ``release[r]``."""
    n = len(duration)
    floor = np.full(n, _NO_PATH)
    for rank in range(len(offset) - 1):
        if offset[rank] < offset[rank + 1]:
            floor[offset[rank]] = release[rank]
    start, end = np.empty(n), np.empty(n)
    for at in topological:
        begin = floor[at]
        if begin == _NO_PATH:  # not its rank's first action
            begin = end[at - 1]
        if source[at] >= 0:
            begin = max(begin, end[source[at]] + delay[at])
        start[at] = begin
        end[at] = begin + duration[at]
    return start, end


@compiled
def _reach(
    topological: IntArray, offset: IntArray, source: IntArray, duration: FloatArray, delay: FloatArray
) -> FloatArray:  # pragma: no cover - compiled
    """D[r, q]: longest path from rank r's first start to rank q's last end, (p, p)."""
    n, p = len(duration), len(offset) - 1
    is_first = np.zeros(n, np.bool_)
    for rank in range(p):
        if offset[rank] < offset[rank + 1]:
            is_first[offset[rank]] = True
    reach = np.full((p, p), _NO_PATH)
    end = np.empty(n)
    for origin in range(p):
        for at in topological:
            begin = _NO_PATH if is_first[at] else end[at - 1]
            if at == offset[origin]:
                begin = 0.0
            if source[at] >= 0:
                arrival = end[source[at]] + delay[at]
                begin = max(begin, arrival)
            end[at] = begin + duration[at] if begin > _NO_PATH / 2 else _NO_PATH
        for rank in range(p):
            if offset[rank] < offset[rank + 1]:
                reach[origin, rank] = end[offset[rank + 1] - 1]
    return reach


@compiled
def _max_cycle_mean(weight: FloatArray) -> float:  # pragma: no cover - compiled
    """Largest mean weight of a cycle of a dense digraph (Karp 1978), entries below -1e299 being no edge."""
    p = len(weight)
    walk = np.full((p + 1, p), _NO_PATH)
    walk[0, :] = 0.0  # a virtual source reaches every node
    for length in range(1, p + 1):
        for head in range(p):
            best = _NO_PATH
            for tail in range(p):
                if weight[tail, head] > _NO_PATH / 2 and walk[length - 1, tail] > _NO_PATH / 2:
                    best = max(best, walk[length - 1, tail] + weight[tail, head])
            walk[length, head] = best
    mean = _NO_PATH
    for node in range(p):
        if walk[p, node] > _NO_PATH / 2:
            smallest = np.inf
            for length in range(p):
                if walk[length, node] > _NO_PATH / 2:
                    smallest = min(smallest, (walk[p, node] - walk[length, node]) / (p - length))
            mean = max(mean, smallest)
    return mean


@compiled
def _potentials(weight: FloatArray, mean: float) -> FloatArray:  # pragma: no cover - compiled
    """x with x[q] >= x[r] + weight[r, q] - mean for all r, q (Bellman-Ford from zero)."""
    p = len(weight)
    x = np.zeros(p)
    for _ in range(p):
        for head in range(p):
            for tail in range(p):
                if weight[tail, head] > _NO_PATH / 2:
                    x[head] = max(x[head], x[tail] + weight[tail, head] - mean)
    return x
