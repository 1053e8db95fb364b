"""The verifier's own view of time: an order's precedence graph, and how a span is proved or refuted.

A span needs no algorithm that computes it to be checked: a window that all ranks fit is shown by start
times that meet every inequality, and one that they cannot fit by paths that lead from rank to rank in a
circle and are longer than it on average. Both are looked for by pushing starts, and checked action by action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import can_compile, compiled_where_possible
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]


def for_loops(array: IntArray) -> IntArray:
    """What a kernel should read an array from: a list where it runs as plain Python, in half the time."""
    return array if can_compile() else cast(IntArray, array.tolist())


def columns(orders: Orders) -> tuple[IntArray, IntArray, IntArray]:
    """Stages, letters and microbatches, :func:`for_loops`."""
    return for_loops(orders.stage), for_loops(orders.letter), for_loops(orders.microbatch)


@dataclass(frozen=True, eq=False)
class Graph:
    """The precedence graph of an order, and a sequence in which it can execute.

    Attributes
    ----------
    previous
        (n,) the action before on the same rank; -1 - rank for its first.
    feed, delay
        (n,) the action of another stage that an action waits for, or -1, and the transfer in between.
    duration
        (n,) float64.
    sequence
        (n,) every action after those that it waits for.
    first, last
        (p,) every rank's first and last action.
    """

    previous: IntArray
    feed: IntArray
    delay: FloatArray
    duration: FloatArray
    sequence: IntArray
    first: IntArray
    last: IntArray

    @classmethod
    def of(cls, problem: Problem, orders: Orders, where: IntArray) -> Graph:
        """The graph of a complete order; ``where`` as in :mod:`zbv_solver.verify.verifier`.

        Raises
        ------
        InvalidPlan
            When a cycle makes the order a deadlock.
        """
        costs, placement, m = problem.costs, problem.placement, problem.microbatches
        durations = np.zeros((4, problem.n_stages))
        durations[F], durations[I], durations[W] = costs.forward, costs.backward_input, costs.backward_weight
        durations[B] = [costs.fused(stage) for stage in range(problem.n_stages)]
        transfers = [
            0.0 if placement.rank_of[boundary] == placement.rank_of[boundary + 1] else latency
            for boundary, latency in enumerate(costs.p2p)
        ]
        lag = np.array(transfers, dtype=np.float64)
        previous = np.arange(-1, len(orders) - 1, dtype=np.int32)
        filled = np.flatnonzero(np.diff(orders.offset))
        previous[orders.offset[filled]] = -1 - filled
        feed, delay = _feeds(*columns(orders), for_loops(where), lag, m)
        sequence, done = _kahn(for_loops(previous), for_loops(feed))
        if done < len(orders):
            stuck = np.ones(len(orders), dtype=bool)
            stuck[sequence[:done]] = False
            raise InvalidPlan(
                f"the order deadlocks: {len(orders) - done} actions wait in a circle, among them "
                f"{orders.text_at(int(np.argmax(stuck)))}."
            )
        duration = durations[orders.letter, orders.stage]
        return cls(previous, feed, delay, duration, sequence, orders.offset[:-1], orders.offset[1:] - 1)

    def earliest(self, release: FloatArray) -> FloatArray:
        """Earliest starts (n,) when rank r may not start before ``release[r]``."""
        return _earliest(self.sequence, self.previous, self.feed, self.delay, self.duration, release)

    def waits(self, start: FloatArray) -> bool:
        """Whether start times meet every inequality: nothing starts before what it waits for has ended."""
        return bool(_waits(self.previous, self.feed, self.delay, self.duration, start))

    def trace(self, start: FloatArray, release: FloatArray, rank: int) -> tuple[int, float]:
        """A path to the rank's last action: the rank with whose first action it begins, and its length."""
        at = int(self.last[rank])
        origin, length = _trace(at, self.previous, self.feed, self.delay, self.duration, start, release)
        return int(origin), float(length)


def circle(graph: Graph, window: float, release: FloatArray) -> float | None:
    """Decide whether start times exist that keep every rank within a window, with a witness either way.

    Pushes first starts up (``release``, in place) until every window fits. A push follows a path: it ties
    a rank to the one where the path to its last end begins. Paths that close a circle take longer on
    average than the window, so no start times can help.

    Returns
    -------
    The mean length of such a circle's paths, each walked action by action; or None, once start times have
    been found and every inequality checked.
    """
    pushed_by: dict[int, tuple[int, float]] = {}
    # Without a circle, no chain of pushes passes a rank twice; the rest is for rounding.
    for _ in range(2 * len(release) + 8):
        start = graph.earliest(release)
        needed = start[graph.last] + graph.duration[graph.last] - window
        late = np.flatnonzero(needed > release + 1e-12 * abs(window))
        if not len(late):
            if not graph.waits(start) or np.any(needed > start[graph.first] + 1e-12 * abs(window)):
                raise InvalidPlan("the span cannot be checked: an action would start before its inputs.")
            return None
        for rank in late.tolist():
            pushed_by[rank] = graph.trace(start, release, rank)
        mean = _longest_circle(pushed_by)
        if mean > window:
            return mean
        release[late] = needed[late]
    raise InvalidPlan("the span cannot be checked: neither start times nor a circle of paths decides it.")


def _longest_circle(pushed_by: dict[int, tuple[int, float]]) -> float:
    """Largest mean length of a circle of pushes, or -inf."""
    best = -math.inf
    for begin in pushed_by:
        total, count, rank = 0.0, 0, begin
        while rank in pushed_by and count <= len(pushed_by):
            rank, length = pushed_by[rank]
            total += length
            count += 1
            if rank == begin:
                best = max(best, total / count)
                break
    return best


@compiled_where_possible
def _feeds(
    stage: IntArray, letter: IntArray, microbatch: IntArray, where: IntArray, lag: FloatArray, m: int
) -> tuple[IntArray, FloatArray]:  # pragma: no cover - compiled
    """What every action takes from a neighbouring stage, and the transfer's latency."""
    n, last_stage = len(stage), len(lag)
    feed, delay = np.full(n, -1, np.int32), np.zeros(n)
    for at in range(n):
        s, k, j = stage[at], letter[at], microbatch[at]
        if k == F and s > 0:
            feed[at] = where[4 * ((s - 1) * m + j) + F]
            delay[at] = lag[s - 1]
        elif k != F and k != W and s < last_stage:
            above = 4 * ((s + 1) * m + j)
            feed[at] = max(where[above + I], where[above + B])
            delay[at] = lag[s]
    return feed, delay


@compiled_where_possible
def _kahn(previous: IntArray, feed: IntArray) -> tuple[IntArray, int]:  # pragma: no cover - compiled
    """Actions in a sequence where each follows what it waits for, and how many can execute at all."""
    n = len(previous)
    takes, waiting = np.full(n, -1, np.int32), np.zeros(n, np.int8)
    queue, size, done = np.empty(n, np.int32), 0, 0
    for at in range(n):
        if feed[at] >= 0:
            takes[feed[at]] = at
            waiting[at] += 1
        if previous[at] >= 0:
            waiting[at] += 1
        if waiting[at] == 0:
            queue[size] = at
            size += 1
    while done < size:
        at = queue[done]
        done += 1
        follower = takes[at]
        if follower >= 0:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
        follower = at + 1
        if follower < n and previous[follower] == at:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
    return queue, done


@compiled_where_possible
def _earliest(
    sequence: IntArray,
    previous: IntArray,
    feed: IntArray,
    delay: FloatArray,
    duration: FloatArray,
    release: FloatArray,
) -> FloatArray:  # pragma: no cover - compiled
    start = np.empty(len(sequence))
    for at in sequence:
        before, remote = previous[at], feed[at]
        begin = start[before] + duration[before] if before >= 0 else release[-1 - before]
        if remote >= 0:
            begin = max(begin, start[remote] + duration[remote] + delay[at])
        start[at] = begin
    return start


@compiled_where_possible
def _waits(
    previous: IntArray, feed: IntArray, delay: FloatArray, duration: FloatArray, start: FloatArray
) -> bool:  # pragma: no cover - compiled
    for at in range(len(start)):
        before, remote = previous[at], feed[at]
        if before >= 0 and start[at] < start[before] + duration[before]:
            return False
        if remote >= 0 and start[at] < start[remote] + duration[remote] + delay[at]:
            return False
    return True


@compiled_where_possible
def _trace(
    at: int,
    previous: IntArray,
    feed: IntArray,
    delay: FloatArray,
    duration: FloatArray,
    start: FloatArray,
    release: FloatArray,
) -> tuple[int, float]:  # pragma: no cover - compiled
    """Walk back from an action along what it waited for longest; the rank of the first action, the length."""
    length = 0.0
    while True:
        length += duration[at]
        before, remote = previous[at], feed[at]
        free = start[before] + duration[before] if before >= 0 else release[-1 - before]
        if remote >= 0 and start[remote] + duration[remote] + delay[at] > free:
            length += delay[at]
            at = remote
        elif before >= 0:
            at = before
        else:
            return -1 - before, length
