"""Good cuts for a fixed order, by iterated descent: parts move between stages, and every cut is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from random import Random

import numpy as np

from zbv_solver.partition.cut_space import Boundaries, CutSpace, CutTables
from zbv_solver.partition.first_cuts import fitting_starts, level_cut
from zbv_solver.partition.fixed_order import FixedOrder
from zbv_solver.partition.runs import WHOLE, Choice, First, Recomputed, Runs
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import ROUNDING, SEARCH_MEMORY, exceeds
from zbv_solver.problem.problem import objective_value
from zbv_solver.timing.start_times import evaluate

KICKS, MOST_MOVED = 3, 4
"""Random moves before a descent begins again, and the parts that one of them moves at most."""
MOST_FAILED = 20
"""Descents in a row that find nothing better before the search ends."""


TIMED, MOVED = 4_000, 400
"""What every timing and every move costs in addition to the actions timed."""


class CutDescent:
    """Moves over the cuts of a space."""

    def __init__(
        self,
        runs: Runs,
        order: FixedOrder,
        actions: int,
        seed: int,
        recompute: Recomputed | First | None,
    ):
        self.runs, self.order, self.random = runs, order, Random(seed)
        self.left = actions  # that may still be timed
        self.recompute = recompute  # None lets moves choose the stages
        self.best: Choice | None = None  # the best cut that fits, and its objective
        self.value = math.inf
        self.closest: Choice | None = None  # the least memory beyond the limits, as a share of the limit
        self.excess = math.inf
        self.is_over: Callable[[], bool] = lambda: False

    def may_go_on(self) -> bool:
        """Whether actions and time are left."""
        return self.left > 0 and not self.is_over()

    @cached_property
    def moves(self) -> list[tuple[int, int]]:
        """All moves: from one stage to another, or equal stages to recompute one or not."""
        stages = range(self.runs.space.n_stages)
        return [(one, other) for one in stages for other in stages if one != other or self.recompute is None]

    def at(self, bounds: Boundaries) -> Choice:
        """A cut with what is recomputed: of first layers the fewest with which it fits, or else the most.

        More of them take longer and hold less.
        """
        stages, first = self.runs.space.n_stages, self.recompute
        if not isinstance(first, First):
            return bounds, first or (0,) * stages
        counts = self.runs.counts(bounds)
        most = int((np.diff(counts, axis=0) @ self.runs.can_recompute).max())
        low, high = first.least, max(first.least, min(first.most, most))
        if low == high or not self._excess((bounds, (low,) * stages)):
            return bounds, (low,) * stages
        low += 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._excess((bounds, (middle,) * stages)) else (low, middle)
        return bounds, (low,) * stages

    def consider(self, choice: Choice) -> tuple[float, float]:
        """A cut's excess and objective, inf if it does not fit; the best cut is kept."""
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
        """Descend, and again from random changes of the best cut, until that rarely helps."""
        current, failed = self._descended(start, self.consider(start)), 0
        while self.may_go_on() and self.moves and failed < MOST_FAILED:
            before = current[1]
            changed = current[0]
            for _ in range(KICKS):
                parts = self.random.randint(1, MOST_MOVED)
                changed = self._moved(changed, self.random.choice(self.moves), parts) or changed
            found = self._descended(changed, self.consider(changed))
            if found[1] <= current[1]:
                current = found
            failed = 0 if found[1] < before else failed + 1

    def _descended(self, choice: Choice, at: tuple[float, float]) -> tuple[Choice, tuple[float, float]]:
        """A cut that no single move improves, if the actions suffice, with its excess and objective."""
        is_better = True
        while is_better and self.may_go_on():
            is_better = False
            self.random.shuffle(self.moves)
            for move in self.moves:
                moved = self._moved(choice, move)
                self.left -= MOVED
                if moved is None:
                    continue
                found = self.consider(moved)
                if found[0] < at[0] or found[1] < at[1] * (1 - ROUNDING):
                    choice, at, is_better = moved, found, True
                if not self.may_go_on():
                    break
        return choice, at

    def _moved(self, choice: Choice, move: tuple[int, int], parts: int = 1) -> Choice | None:
        """A cut with parts moved from one stage to another, or one stage recomputed or not (equal stages).

        None if that is not allowed.
        """
        bounds, recompute = list(choice[0]), choice[1]
        one, other = move
        if one == other:
            return choice[0], (*recompute[:one], WHOLE - recompute[one], *recompute[one + 1 :])
        step = parts if one > other else -parts
        for bound in range(min(one, other) + 1, max(one, other) + 1):
            bounds[bound] += step
        moved = tuple(bounds)
        if not self.runs.allows(moved):
            return None
        return (moved, recompute) if self.recompute is None else self.at(moved)


ACTIONS = 5_000_000
"""Actions that the search for one order may time: some tenths of a second."""


def cut_for_order(problem: LayeredProblem, orders: Orders, also: Sequence[Cut] = ()) -> Cut:
    """The best cut of layers that was found for an order, on the problem's only placement.

    If no cut is found that fits the memory limit, the cut is the best one without it, and nothing is
    recomputed.

    Parameters
    ----------
    also
        Cuts that the result must not be worse than.
    """
    found = _searched(problem, orders, also) or _searched(replace(problem, limit=None), orders, also)
    if found is None:
        raise RuntimeError("no cut was timed; this is a bug in zbv, please report it.")
    return found


def _searched(problem: LayeredProblem, orders: Orders, also: Sequence[Cut]) -> Cut | None:
    """The best cut that fits; None if none was found."""
    (placement,) = problem.placements
    space = CutSpace(problem, placement, CutTables.of(problem))
    starts = list(dict.fromkeys(_starts(space, also)))
    if not problem.has_equal_ranks:
        return _best_of(space, orders, starts)
    runs = Runs.of(space)
    if runs.allow_none:
        return _best_of(space, orders, starts)
    order = FixedOrder.of(problem.cut_into(placement, starts[0]), orders)
    can_choose = problem.limit is not None and problem.model.can_recompute
    local = CutDescent(runs, order, ACTIONS, 0, None if can_choose else (0,) * space.n_stages)
    for cut in starts:
        if (allowed := runs.repaired(space.bounds_of(cut))) is not None:
            local.consider((allowed, tuple(WHOLE * again for again in cut.recompute)))
    first = local.best or local.closest
    if first is not None:
        local.run(first)
    if local.best is not None:
        bounds, chosen = local.best
        starts.insert(0, space.cut(bounds, tuple(map(bool, chosen))))
    # Moves keep a layer on the first and on the last stage; a start may have none there.
    return _best_of(space, orders, starts)


def _starts(space: CutSpace, also: Sequence[Cut]) -> Iterator[Cut]:
    """The given cuts and the usual ones, with those stages recomputed that need to be."""
    level = level_cut(space)
    yield space.cut(level, (False,) * space.n_stages)
    if space.problem.limit is not None and space.tables.variants > 1:
        yield space.cut(level, (True,) * space.n_stages)
    for cut in also:
        bounds = space.bounds_of(cut)
        if space.allows(bounds) and space.cut(bounds, cut.recompute) == cut:
            yield cut
    yield from fitting_starts(space, level)[0].values()


def _best_of(space: CutSpace, orders: Orders, cuts: Iterable[Cut]) -> Cut | None:
    """The best of some cuts that fit."""
    limits, best, least = space.problem.limit, None, float("inf")
    for cut in cuts:
        timing = evaluate(replace(space.problem, limit=None).cut_into(space.placement, cut), orders)
        peaks = zip(timing.peak_memory, limits or (), strict=False)
        value = objective_value(space.problem.objective, timing)
        if value < least and not any(exceeds(peak, limit, SEARCH_MEMORY) for peak, limit in peaks):
            best, least = cut, value
    return best
