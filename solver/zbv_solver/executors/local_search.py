"""Good cuts for a fixed order, by annealing: parts move between stages, and every cut is timed."""

from __future__ import annotations

import math
from random import Random

import numpy as np

from zbv_solver.executors.fixed_order import FixedOrder
from zbv_solver.executors.runs import Choice, Runs
from zbv_solver.problem.numeric import ROUNDING, SEARCH_MEMORY

WARMEST, COLDEST = 0.01, 1e-5
"""Temperatures, as shares of the objective or of a rank's limit."""


TIMED, MOVED = 4_000, 400
"""What every timing and every move costs in addition to the actions timed."""


class LocalSearch:
    """Moves over the cuts of a space.

    Attributes
    ----------
    best, value
        The best cut that fits, if any, and its objective.
    closest, excess
        The cut with the least memory beyond the limits, and that excess as a share of the limit.
    left
        Actions that may still be timed.
    """

    def __init__(self, runs: Runs, order: FixedOrder, actions: int, seed: int, may_recompute: bool):
        self.runs, self.order, self.left = runs, order, actions
        self.random, self.may_recompute = Random(seed), may_recompute
        self.best: Choice | None = None
        self.value = self.excess = math.inf
        self.closest: Choice | None = None

    def consider(self, choice: Choice) -> tuple[float, float]:
        """A cut's excess and objective; it is kept if it is the best. A cut that does not fit is not timed."""
        excess = self._excess(choice)
        if excess < self.excess:
            self.closest, self.excess = choice, excess
        if excess > 0:
            return excess, math.inf
        self.left -= len(self.order.orders) + TIMED
        value = self.runs.value(self.order, choice)
        if value < self.value * (1 - ROUNDING):
            self.best, self.value = choice, value
        return 0.0, value

    def _excess(self, choice: Choice) -> float:
        """The largest share by which a rank exceeds its limit; 0 if all ranks fit."""
        limits = self.runs.space.problem.limit
        if limits is None:
            return 0.0
        peaks, limit = self.runs.peaks(self.order, choice), np.array(limits)
        over = (peaks - limit) / np.where(limit > 0, limit, np.maximum(peaks, 1e-300))
        worst = float(over.max())
        return worst if worst > SEARCH_MEMORY / 2 else 0.0

    def run(self, start: Choice) -> None:
        """Anneal from a cut until the actions are spent: first until it fits, then for the objective."""
        at = self.consider(start)
        current, moves = start, 0
        most = max(1, self.left)
        while self.left > 0:
            moves += 1
            self.left -= MOVED
            moved = self._moved(current)
            if moved is None:
                continue
            found = self.consider(moved)
            warm = WARMEST * (COLDEST / WARMEST) ** (1 - max(0, self.left) / most)
            unit = self.value if at[0] == 0 else 1.0
            worse = found[1] - at[1] if at[0] == 0 else found[0] - at[0]
            if found[0] > 0 and at[0] == 0:
                continue
            if worse <= 0 or self.random.random() < math.exp(-worse / (warm * unit or 1.0)):
                current, at = moved, found

    def _moved(self, choice: Choice) -> Choice | None:
        """A cut with one part moved to another stage, or one stage recomputed or not; None if not allowed."""
        bounds, recompute = list(choice[0]), choice[1]
        stages = len(recompute)
        if self.may_recompute and (stages == 1 or self.random.random() < 0.3):
            at = self.random.randrange(stages)
            return choice[0], (*recompute[:at], not recompute[at], *recompute[at + 1 :])
        if stages == 1:
            return None
        one, other = self.random.sample(range(stages), 2)
        step = 1 if one > other else -1
        for bound in range(min(one, other) + 1, max(one, other) + 1):
            bounds[bound] += step
        moved = tuple(bounds)
        return (moved, recompute) if self.runs.allows(moved) else None
