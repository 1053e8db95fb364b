"""Of the cuts that are nearly as good as the best one, the most regular.

The best cut is often irregular for the sake of a fraction of a percent, and stages that are empty or all of
different lengths are hard to read, to justify and to keep when something else changes. Regular means, in this
order: few empty stages, few different numbers of transformer layers, few changes of the number from one stage
to the next (a short layout string), and a small difference between the most and the fewest.

If there are few cuts, all of them are compared. Otherwise a few thousand simple patterns are, and then cuts
that differ from the most regular of these by one layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.partition.cut_space import Boundaries
from zbv_solver.partition.descent import TIMED
from zbv_solver.partition.runs import Choice
from zbv_solver.problem.numeric import ROUNDING, SEARCH_MEMORY

from zbv_models.fixed_orders.order_search import SCREENED, OrderSearch, all_bounds, proved_of

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


@dataclass(frozen=True, eq=False)
class Once:
    """What a step needs once, in addition to the objective."""

    parts: FloatArray
    """(n,) of every part; the rank with the most counts."""
    fixed: float = 0.0
    """In any case."""


def regular_cut(search: OrderSearch, once: Once | None = None) -> Choice:
    """The most regular cut that fits and is at most :data:`TOLERANCE` longer than the best cut of a search.

    It is not longer than the executor's own cut either, unless the best cut is. Of equally regular ones it is
    the shortest, as far as the effort allows. Once the search's time is over, the best cut is the result.

    Parameters
    ----------
    once
        With it, the step is at most :data:`TOLERANCE` longer, too.

    Raises
    ------
    ValueError
        When the search has no cut.
    """
    if search.best is None:
        raise ValueError("found a search without a cut.")
    if search.is_over or search.space.n_stages == 1:
        return search.best
    return _Regular(search, search.best, once).found()


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
    """What makes a cut regular, and good, around the best one of a search."""

    def __init__(self, search: OrderSearch, best: Choice, once: Once | None):
        self.search, self.best = search, best
        problem, runs = search.problem, search.runs
        self.blocks_before = np.array(problem.model.blocks_before)[problem.places]
        forward, inputs, weights, fused = np.repeat(runs.duration[0], runs.size, axis=1)
        work = forward + np.minimum(inputs + weights, fused)
        self.work_before = np.concatenate([[0.0], np.cumsum(work)])
        once = once or Once(np.zeros(len(work)))
        self.once = once.parts
        self.once_before = np.concatenate([[0.0], np.cumsum(once.parts)])
        self.most = search.value * (1 + TOLERANCE)
        if search.even >= search.value:
            self.most = min(self.most, search.even * (1 + ROUNDING))
        step = search.value + self._busiest(self.once_before, np.array([best[0]])).item()
        self.most_step = (step + once.fixed) * (1 + TOLERANCE) - once.fixed
        self.left = max(FEWEST_TIMED, SCREENED[search.effort] // (len(search.order.orders) + TIMED))

    def found(self) -> Choice:
        """The most regular cut of all, or of evenly dealt ones, from which layers then move one by one."""
        bounds = all_bounds(self.search.runs, self.most / self.search.problem.microbatches)
        if bounds is not None:
            terms = self.search.tight_terms()
            proved = proved_of(self.search.runs, terms, bounds, self.best[1])
            return self._better(self.best, bounds[proved <= self.most * (1 + ROUNDING)])
        choice = self._better(self.best, self._dealt())
        while True:
            moved = self._better(choice, self._moved(choice[0]))
            if moved == choice:
                return choice
            choice = moved

    def _better(self, choice: Choice, bounds: IntArray) -> Choice:
        """The most regular of a cut and of those with other boundaries (n, S+1) that are good."""
        most = self.irregularity(choice)
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
            value = self.value(other)
            if self.is_good(other, value):
                good.append((value, other))
                most = irregularity
        return min(good, default=(0.0, choice))[1]

    def irregularity(self, choice: Choice) -> list[int]:
        """How irregular a cut is."""
        found: list[int] = self._irregularity(np.array([choice[0]]))[0].tolist()
        return found

    def is_good(self, choice: Choice, value: float) -> bool:
        """Whether a cut with this objective is hardly longer than the best one."""
        step = value + self._busiest(self.once_before, np.array([choice[0]])).item()
        return value <= self.most and step <= self.most_step

    def _irregularity(self, bounds: IntArray) -> IntArray:
        return irregularities(np.diff(self.blocks_before[bounds], axis=1), np.diff(bounds, axis=1))

    def value(self, choice: Choice) -> float:
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
        return self._busiest(self.work_before, bounds)

    def _busiest(self, before: FloatArray, bounds: IntArray) -> FloatArray:
        """(n,) the most of a sum over parts that a rank has."""
        stages = np.array(self.search.space.placement.stages_of)
        most: FloatArray = np.diff(before[bounds], axis=1)[:, stages].sum(axis=2).max(axis=1)
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
