"""Of the cuts that are nearly as good as the best one, the most regular.

The best cut is often irregular for the sake of a fraction of a percent, and stages that are empty or all of
different lengths are hard to read, to justify and to keep when something else changes. Regular means, in this
order: few empty stages, few different numbers of transformer layers, few changes of the number from one stage
to the next (a short layout string), and a small difference between the most and the fewest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zbv_solver.executors.order_search import SCREENED, OrderSearch
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.partition.cut_space import Boundaries
from zbv_solver.partition.descent import TIMED
from zbv_solver.partition.runs import Choice
from zbv_solver.problem.numeric import ROUNDING, SEARCH_MEMORY

TOLERANCE = 0.01
"""How much longer than the best cut a more regular one may be."""
MOST_DEALT = 100_000
"""Cuts with evenly dealt middle stages that are compared at most."""
FEWEST_TIMED = 20
"""Cuts that are timed at least."""
MOST_EQUAL = 8
"""Equally regular good cuts that are timed to find the shortest of them."""

Irregularity = tuple[int, ...]
"""Empty stages, different numbers of transformer layers, changes between neighbours, and their range."""


def regular_cut(search: OrderSearch) -> Choice:
    """The most regular cut that fits and is at most :data:`TOLERANCE` longer than the best cut of a search.

    It is not longer than the executor's own cut either, unless the best cut is. Of a few equally regular ones
    it is the shortest.

    Candidates have middle stages of one length, or of two that differ by one; the first and the last two
    stages have any. From the best candidate, layers move one by one as long as it becomes more regular. Other
    cuts are not tried. Once the search's time is over, the best cut is the result.

    Raises
    ------
    ValueError
        When the search has no cut.
    """
    if search.best is None:
        raise ValueError("found a search without a cut.")
    if search.is_over or search.space.n_stages == 1:
        return search.best
    return _Regular(search, search.best).found()


def irregularities(blocks: IntArray, parts: IntArray) -> IntArray:
    """(n, 4) irregularity of n cuts with these transformer layers and parts of stages, (n, S) each."""
    ordered = np.sort(blocks, axis=1)
    return np.stack(
        [
            (parts == 0).sum(axis=1),
            (np.diff(ordered, axis=1) > 0).sum(axis=1) + 1,
            (np.diff(blocks, axis=1) != 0).sum(axis=1),
            ordered[:, -1] - ordered[:, 0],
        ],
        axis=1,
    )


class _Regular:
    """The cuts around the best one of a search."""

    def __init__(self, search: OrderSearch, best: Choice):
        self.search, self.best = search, best
        problem, runs = search.problem, search.runs
        self.blocks_before = np.array(problem.model.blocks_before)[problem.places]
        forward, inputs, weights, fused = np.repeat(runs.duration[0], runs.size, axis=1)
        work = forward + np.minimum(inputs + weights, fused)
        self.work_before = np.concatenate([[0.0], np.cumsum(work)])
        self.most = search.value * (1 + TOLERANCE)
        if search.even >= search.value:
            self.most = min(self.most, search.even * (1 + ROUNDING))
        self.left = max(FEWEST_TIMED, SCREENED[search.effort] // (len(search.order.orders) + TIMED))

    def found(self) -> Choice:
        """The most regular cut."""
        choice = self._better(self.best, self._dealt())
        while True:
            moved = self._better(choice, self._moved(choice[0]))
            if moved == choice:
                return choice
            choice = moved

    def _better(self, choice: Choice, bounds: IntArray) -> Choice:
        """The most regular of a cut and of those with other boundaries (n, S+1) that are good."""
        most = self._irregularity(np.array([choice[0]]))[0].tolist()
        found = self._irregularity(bounds)
        order = np.lexsort((self._work(bounds), *found.T[::-1]))
        good: list[tuple[float, Choice]] = []
        for at in order.tolist():
            irregularity = found[at].tolist()
            if irregularity >= most and (not good or irregularity > most):
                break
            if self.left <= 0 or len(good) == MOST_EQUAL:
                break
            other = tuple(bounds[at].tolist()), choice[1]
            value = self._value(other)
            if value <= self.most:
                good.append((value, other))
                most = irregularity
        return min(good, default=(0.0, choice))[1]

    def _irregularity(self, bounds: IntArray) -> IntArray:
        return irregularities(np.diff(self.blocks_before[bounds], axis=1), np.diff(bounds, axis=1))

    def _value(self, choice: Choice) -> float:
        """The objective of a cut; inf if it is not allowed or does not fit."""
        runs, order, limits = self.search.runs, self.search.order, self.search.problem.limit
        if not runs.allows(choice[0]):
            return math.inf
        self.left -= 1
        if (
            limits is not None
            and (runs.peaks(order, choice) > np.array(limits) * (1 + SEARCH_MEMORY / 2)).any()
        ):
            return math.inf
        return runs.value(order, choice)

    def _work(self, bounds: IntArray) -> FloatArray:
        """(n,) most work of a rank for one microbatch."""
        stages = np.array(self.search.space.placement.stages_of)
        most: FloatArray = np.diff(self.work_before[bounds], axis=1)[:, stages].sum(axis=2).max(axis=1)
        return most

    def _dealt(self) -> IntArray:
        """(n, S+1) boundaries with evenly dealt middle stages, without those with too much work on a rank."""
        found = np.concatenate([*self._patterns()])
        kept: IntArray = found[
            self._work(found) * self.search.problem.microbatches <= self.most * (1 + ROUNDING)
        ]
        return kept

    def _patterns(self) -> Iterator[IntArray]:
        """All ends of the first stage and begins of the last two; longer middle stages are first or last."""
        bounds, n = np.array(self.best[0]), len(self.work_before) - 1
        free = min(3, len(bounds) - 2)
        width = int(MOST_DEALT ** (1 / free)) // 2
        places = bounds[[1, -2, -3][:free]]
        ranges = [np.arange(max(1, at - width), min(n - 1, at + width) + 1) for at in places.tolist()]
        chosen = [each.ravel() for each in np.meshgrid(*ranges, indexing="ij")]
        if free == 1:
            yield np.stack([0 * chosen[0], chosen[0], 0 * chosen[0] + n], axis=1)
            return
        head, end = chosen[:2]
        before = chosen[2] if free == 3 else head
        is_ordered = (head <= before) & (before <= end)
        head, before, end = head[is_ordered], before[is_ordered], end[is_ordered]
        middle = len(bounds) - 4
        each, rest = np.divmod(before - head, max(1, middle))
        for shift in (0 * rest, middle - rest):
            inner = [head + k * each + np.clip(k - shift, 0, rest) for k in range(middle + 1)]
            yield np.stack([0 * head, *inner, end, 0 * head + n], axis=1)

    def _moved(self, bounds: Boundaries) -> IntArray:
        """(n, S+1) boundaries after a part has moved from one stage to another."""
        stages = len(bounds) - 1
        found = []
        for one in range(stages):
            for other in range(stages):
                low, high = min(one, other), max(one, other)
                moved = np.array(bounds)
                moved[low + 1 : high + 1] += 1 if one > other else -1
                found.append(moved)
        return np.array(found)
