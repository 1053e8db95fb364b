"""The order in which microbatches that differ enter the pipeline.

Small microbatches at both ends make the ramps short, and large ones in between need the most memory where
the pipeline is full anyway. Where the largest one is best depends on the problem, so several peaks are tried.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.problem.problem import B, F, I, Problem, W

PEAKS = (0.5, 0.65, 0.8, 1.0)
"""Places of the largest microbatch, as shares of the way, that are tried first."""


def sizes(problem: Problem) -> FloatArray:
    """The work of every microbatch over all stages, (m,)."""
    found: FloatArray = sizes_of_kinds(problem)[problem.arrays.kind_of]
    return found


def sizes_of_kinds(problem: Problem) -> FloatArray:
    """The work of a microbatch of every kind over all stages, (K,)."""
    duration = problem.arrays.duration
    work: FloatArray = (duration[F] + np.minimum(duration[B], duration[I] + duration[W])).sum(axis=0)
    return work


def mountain(size: FloatArray, peak: float) -> IntArray:
    """Small microbatches at both ends, the largest one at a share ``peak`` of the way, (m,).

    Microbatches of equal size keep their order. If all are equal, the order is ascending.
    """
    m = len(size)
    left = round(peak * (m - 1))
    before, after = left, m - 1 - left
    first, last = 0, m - 1
    order = np.empty(m, np.int64)
    ascending = np.argsort(size, kind="stable")
    if m == 0 or size[ascending[0]] == size[ascending[-1]]:
        return np.arange(m)
    for microbatch in ascending:
        # From the outside in, in proportion to the places that each side has left.
        if last <= left or (first < left and (left - first) * after >= (last - left) * before):
            order[first] = microbatch
            first += 1
        else:
            order[last] = microbatch
            last -= 1
    return order


def practice_order(problem: Problem) -> IntArray:
    """The order used in practice, (m,): sorted by work, the small ones at both ends."""
    return mountain(sizes(problem), PEAKS[0])


def changed(entry: IntArray, random: np.random.Generator, begin: int = 0) -> IntArray:
    """A copy with one change from the place ``begin`` on: two swapped, one moved, or a stretch reversed."""
    m, found = len(entry), entry.copy()
    if m - begin < 2:
        return found
    one, other = sorted((begin + random.choice(m - begin, 2, replace=False)).tolist())
    kind = random.random()
    if kind < 0.4:
        found[one], found[other] = entry[other], entry[one]
    elif kind < 0.6:
        found[one : other + 1] = np.roll(entry[one : other + 1], 1)
    elif kind < 0.8:
        found[one : other + 1] = np.roll(entry[one : other + 1], -1)
    else:
        other = min(other, one + 1 + int(random.integers(4)))
        found[one : other + 1] = entry[one : other + 1][::-1]
    return found
