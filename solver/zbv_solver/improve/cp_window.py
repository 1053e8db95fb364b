"""What surrounds a window of an order: heads, tails, and paths that skip the window.

A window is a set of actions with consecutive start times, over all ranks. What runs before it gives every
action inside a head (its earliest start), and what runs after it a tail (the longest path from its end to the
end of a rank). For a span, ranks keep their first starts, and ends are counted from them. The whole problem
is the window that nothing surrounds: there, ranks choose their first starts as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zbv_solver.improve.cp_sat import Grid
from zbv_solver.kernels.arrays import IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.timing.start_times import earliest_times, span_start_times

NEVER = np.iinfo(np.int64).min // 2
BEFORE, INSIDE, AFTER, NOWHERE = range(4)
"""Where an action lies relative to a window."""


@dataclass(frozen=True, eq=False)
class Paths:
    """Longest paths through an order, in parts of the grid; arrays (n,) unless stated otherwise."""

    start: IntArray
    """Earliest starts."""
    end: IntArray
    """Earliest ends."""
    tail: IntArray
    """The longest path from the end to the end of a rank."""
    needs: IntArray
    """(n, 3) actions that must end before this one starts, -1 for none: its rank's previous one first."""
    latency: IntArray
    """(n, 3) the transfer times from them."""
    release: IntArray
    """First start of the action's rank."""

    @classmethod
    def of(cls, grid: Grid, orders: Orders) -> Paths:
        """Paths of an order under the grid's costs."""
        problem = grid.problem
        release = np.zeros(problem.pp_degree, np.int64)
        if problem.objective == "span":
            release = np.floor(span_start_times(problem, orders)[orders.offset[:-1]]).astype(np.int64)
        release = release[orders.rank_index()]
        length = problem.arrays.durations(orders.stage, orders.letter, orders.microbatch).astype(np.int64)
        needs, latency = _needs(problem, orders)
        # Every action takes at least one part, so an action ends later than all that it needs.
        sequence = np.argsort(earliest_times(problem, orders)[1]).tolist()
        rows = list(map(_present, needs.tolist(), latency.tolist()))
        end, tail = (release + length).tolist(), np.full(len(orders), NEVER)
        tail[orders.offset[1:] - 1] = -release[orders.offset[1:] - 1]
        lengths, tails = length.tolist(), tail.tolist()
        for at in sequence:
            for needed, lag in rows[at]:
                end[at] = max(end[at], end[needed] + lag + lengths[at])
        for at in reversed(sequence):
            for needed, lag in rows[at]:
                tails[needed] = max(tails[needed], tails[at] + lengths[at] + lag)
        ends = np.array(end, dtype=np.int64)
        return cls(ends - length, ends, np.array(tails, dtype=np.int64), needs, latency, release)


def _present(needs: list[int], latency: list[int]) -> list[tuple[int, int]]:
    """The actions that one needs, with the transfer times from them."""
    return [(needed, lag) for needed, lag in zip(needs, latency, strict=True) if needed >= 0]


def _needs(problem: Problem, orders: Orders) -> tuple[IntArray, IntArray]:
    """See :class:`Paths`."""
    n, stages = len(orders), problem.n_stages
    index = np.full((3, stages + 2, problem.microbatches), -1)  # a stage without actions at either end
    kind, stage, j = np.where(orders.letter == B, I, orders.letter), orders.stage + 1, orders.microbatch
    index[kind, stage, j] = np.arange(n)
    needs, latency = np.full((n, 3), -1), np.zeros((n, 3), np.int64)
    arrays = problem.arrays
    none = np.zeros((1, arrays.kinds))
    transfer = np.concatenate([none, arrays.latency, none]).astype(np.int64)
    kind_of = arrays.kind_of[orders.microbatch]
    for letter, above in ((F, -1), (I, 1), (W, 0)):
        own = np.flatnonzero(kind == letter)
        needs[own, 1] = index[min(letter, I), stage[own] + above, j[own]]
        latency[own, 1] = 0 if letter == W else transfer[stage[own] - (letter == F), kind_of[own]]
        if letter == I:
            needs[own, 2] = index[F, stage[own], j[own]]
    needs[:, 0] = np.arange(n) - 1
    needs[orders.offset[:-1], 0] = -1
    return needs, latency


@dataclass(frozen=True, eq=False)
class FreeWindow:
    """The free actions of an order, and what the others impose on them."""

    orders: Orders
    free: IntArray
    """(k,) the actions of the window."""
    start: IntArray
    """(k,) when they start in the order."""
    head: IntArray
    """(k,) earliest start by the actions before the window."""
    tail: IntArray
    """(k,) longest path through the actions after the window."""
    closing: IntArray
    """(k,) the part of the tail that follows from the rank alone."""
    floor: int
    """Largest end + tail of paths outside the window: no order of the window gets below."""
    is_whole: bool

    @classmethod
    def whole(cls, paths: Paths, orders: Orders, floor: int) -> FreeWindow:
        """The window of all actions; ``floor`` parts are a bound on the objective."""
        nothing = np.zeros(len(orders), np.int64)
        free = np.arange(len(orders))
        return cls(orders, free, paths.start, nothing, nothing, nothing, floor, True)

    @classmethod
    def between(cls, paths: Paths, orders: Orders, begin: float, end: float) -> FreeWindow:
        """What starts from ``begin`` until before ``end``."""
        n, start, offset = len(orders), paths.start, orders.offset
        place = np.where(start < begin, BEFORE, np.where(start < end, INSIDE, AFTER))
        place = np.append(place, NOWHERE)  # of action -1
        free = np.flatnonzero(place == INSIDE)
        head, tail, closing = paths.release.copy(), np.full(n, NEVER), np.full(n, NEVER)
        length = paths.end - start
        last = offset[1:] - 1
        ended = last[place[last] == BEFORE]
        floor = int((paths.end - paths.release)[ended].max(initial=0))
        for needed, latency in zip(paths.needs.T, paths.latency.T, strict=True):
            # ``needed`` is -1 for no predecessor: this index reads NOWHERE, which no comparison selects.
            enters = np.flatnonzero((place[needed] == BEFORE) & (place[:-1] == INSIDE))
            np.maximum.at(head, enters, paths.end[needed[enters]] + latency[enters])
            leaves = np.flatnonzero((place[needed] <= INSIDE) & (place[:-1] == AFTER))
            onward = latency[leaves] + length[leaves] + paths.tail[leaves]
            np.maximum.at(tail, needed[leaves], onward)
            # No order of the window can shorten a path that skips the window.
            outside = place[needed[leaves]] == BEFORE
            floor = max(floor, int((paths.end[needed[leaves]] + onward)[outside].max(initial=0)))
        # Starts ascend along a rank, so the free actions of a rank are consecutive there.
        for first, stop in pairwise(np.searchsorted(free, offset)):
            inside = free[first:stop]
            if len(inside):  # any of them may come first or last on its rank
                after = inside[-1] + 1
                is_last = after == n or paths.needs[after, 0] < 0
                until = -paths.release[inside[0]] if is_last else length[after] + paths.tail[after]
                previous = paths.needs[inside[0], 0]
                if previous >= 0:
                    head[inside] = np.maximum(head[inside], paths.end[previous])
                tail[inside] = np.maximum(tail[inside], until)
                closing[inside] = until
        return cls(orders, free, start[free], head[free], tail[free], closing[free], floor, False)
