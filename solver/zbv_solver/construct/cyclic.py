"""DynaPipe's schedule for microbatches that differ, written from its paper (Jiang et al., EuroSys 2024).

**Memory-aware cyclic scheduling** (section 5 of the paper). In a cycle each rank runs at most one backward
and then at most one forward, in the order in which microbatches enter; what a rank finishes, its neighbour
may run from the next cycle on. A forward waits while the rank's memory has no room for it. The cycles only
determine the order of the actions: nothing waits for the end of a cycle when the order is run.

**Order of the microbatches.** Microbatches of similar time form three or four clusters. Every order of the
clusters is tried, and the given order; the shortest schedule is taken.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np

from zbv_solver.construct.tables import sizes
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import SEARCH_MEMORY
from zbv_solver.problem.problem import B, F, Problem
from zbv_solver.timing.start_times import objective_of

MANY = 20
"""DynaPipe forms three clusters of more microbatches, otherwise four."""
_ROUNDS = 32


def dynapipe(problem: Problem) -> Orders:
    """The shortest memory-aware cyclic schedule over orders of clusters; one stage per rank.

    It keeps the memory limit unless a single microbatch exceeds it.
    """
    size = sizes(problem)
    clusters = clustered(size, 3 if len(size) > MANY else 4)
    entries = [np.concatenate(each) for each in permutations(clusters)]
    made = [cyclic(problem, entry) for entry in (np.arange(len(size)), *entries)]
    return min(made, key=partial(objective_of, problem))


def cyclic(problem: Problem, entry: IntArray) -> Orders:
    """The memory-aware cyclic schedule of microbatches that enter in the order ``entry``, (m,)."""
    arrays, p, m = problem.arrays, problem.pp_degree, len(entry)
    room = arrays.limit * (1 + SEARCH_MEMORY) - arrays.static
    held = np.cumsum(np.pad(arrays.delta[F][:, arrays.kind_of[entry]], ((0, 0), (1, 0))), axis=1)
    rank = np.arange(p)
    # The cycles of the F's and B's of every rank, one column per microbatch in the order of entry.
    forward, backward = np.zeros((p, m + 1), np.int64), np.zeros((p, m + 1), np.int64)
    gone = np.zeros(p, np.int64)  # backwards that a rank waits for, so that the next forward has room
    for k in range(m):
        while (short := (gone < k) & (held[rank, k + 1] - held[rank, gone] > room)).any():
            gone += short
        # The last column is still 0; it stands for the microbatch before the first one. A backward comes
        # first in its cycle, so a forward may use its memory in the same one.
        earliest = np.maximum(forward[:, k - 1] + 1, backward[rank, gone - 1])
        forward[:, k] = np.maximum.accumulate(earliest - rank) + rank
        earliest = np.maximum(backward[:, k - 1] + 1, forward[:, k] + 1)[::-1]
        backward[:, k] = (np.maximum.accumulate(earliest - rank) + rank)[::-1]
    return _orders(forward[:, :m], backward[:, :m], entry)


def clustered(size: FloatArray, count: int) -> list[IntArray]:
    """Indices of similar sizes together: at most ``count`` clusters, the smallest sizes first.

    The means of Lloyd's algorithm, which start at evenly spread quantiles. Within a cluster the given order
    remains.
    """
    means = np.unique(np.quantile(size, (np.arange(count) + 0.5) / count))
    for _ in range(_ROUNDS):
        nearest = np.abs(size[:, None] - means).argmin(axis=1)
        moved = np.array([size[nearest == each].mean() for each in np.unique(nearest)])
        if np.array_equal(moved, means):
            break
        means = moved
    nearest = np.abs(size[:, None] - means).argmin(axis=1)
    return [np.flatnonzero(nearest == each) for each in np.unique(nearest)]


def _orders(forward: IntArray, backward: IntArray, entry: IntArray) -> Orders:
    """The actions of every rank by cycle, the backward of a cycle first."""
    ranks = []
    for rank, (forwards, backwards) in enumerate(zip(forward, backward, strict=True)):
        rows = np.empty((2 * len(entry), 3), np.int32)
        rows[:, 0] = rank
        rows[:, 1] = np.repeat((F, B), len(entry))
        rows[:, 2] = np.tile(entry, 2)
        ranks.append(rows[np.argsort(np.concatenate([2 * forwards + 1, 2 * backwards]))])
    return Orders.of_rows(ranks)
