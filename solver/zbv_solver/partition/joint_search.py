"""Improve a cut by local search, where constructed orders estimate its objective.

Even loads do not imply that the stages can be ordered well. Starting from the best cut, a move shifts one
part between two stages or changes which stages are recomputed. A cut is not estimated if its load alone
already rules it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np

from zbv_solver.construct.dispatch import ListScheduler
from zbv_solver.construct.greedy_v import GREEDY_COST, get_v_schedule
from zbv_solver.construct.rules import in_flight_caps, simple_rule
from zbv_solver.partition.cut_space import CutSpace, ScoredCut
from zbv_solver.partition.first_cuts import with_room
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem

MOST_IN_VAIN = 12
"""The search ends after this many moves in a row without a gain, in multiples of the number of stages."""
RECOMPUTING = 0.4
"""Share of moves that change which stages are recomputed, if any layer can be recomputed."""


def improve_cut(
    judge: Judge, start: ScoredCut, placements: int, seed: int, is_over: Callable[[], bool]
) -> ScoredCut:
    """The best cut found by moves from a first one; values are estimates of the objective.

    Parameters
    ----------
    placements
        Actions that estimates may place.
    is_over
        Polled between cuts.
    """
    random = np.random.default_rng(seed)
    best, space = start, judge.space
    until, in_vain = judge.placed + placements, 0
    while judge.placed < until and in_vain < MOST_IN_VAIN * space.n_stages and not is_over():
        in_vain += 1
        moved = neighbour(space, best.cut, random)
        if moved is None or judge.floor(moved) >= best.value:
            continue
        value = judge.value(moved)
        if value <= best.value:
            if value < best.value * (1 - OPTIMAL_GAP):
                in_vain = 0
            best = ScoredCut(moved, value, name="moved")
    return best


def neighbour(space: CutSpace, cut: Cut, random: np.random.Generator) -> Cut | None:
    """A random neighbour of a cut; None if the rules or the memory limit forbid it."""
    if space.tables.variants > 1 and random.random() < RECOMPUTING:
        changed = replace(cut, recompute=_recomputed_elsewhere(cut.recompute, random))
        return changed if space.excess(changed) <= 0 else None
    if space.n_stages == 1:
        return None
    low, high = sorted(map(int, random.choice(space.n_stages, 2, replace=False)))
    step = int(random.choice((-1, 1)))
    bounds = tuple(
        bound + step if low < number <= high else bound for number, bound in enumerate(space.bounds_of(cut))
    )
    if not space.allows(bounds):
        return None
    moved = space.cut(bounds, cut.recompute)
    return moved if space.excess(moved) <= 0 else space.fitting(bounds, cut.recompute)


def _recomputed_elsewhere(recompute: tuple[bool, ...], random: np.random.Generator) -> tuple[bool, ...]:
    """Change one stage, make a run of stages equal, or swap two stages."""
    changed, stages = list(recompute), len(recompute)
    one, other = sorted(map(int, random.integers(stages, size=2)))
    kind = int(random.integers(3))
    if kind == 0:
        changed[one] = not changed[one]
    elif kind == 1:
        changed[one : other + 1] = [bool(random.integers(2))] * (other + 1 - one)
    else:
        changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)


FEW, FEWER = 2, 1
"""Microbatches of the orders that estimate a cut, in multiples of p. More would only repeat the steady state.

If memory is scarce, a microbatch of the steady state takes longer than the most loaded rank's work. Its time
is then the difference between orders with the two numbers of microbatches.
"""
ENOUGH = 0.75
"""Microbatches (in multiples of p) that every rank must have room for, or memory counts as scarce."""
GREEDY_ORDERS = 4
RULES = (
    ("backward-deep", 1.0, 0.5),
    ("backward-deep", 0.75, 0.5),
    ("backward-shallow", 1.0, 0.5),
    ("forward-deep", 1.0, 0.5),
)


class Judge:
    """Estimates cuts of one space, each of them once, and counts the actions ``placed`` for it."""

    def __init__(self, space: CutSpace):
        self.space, self.placed = space, 0
        p, microbatches = space.problem.pp_degree, space.problem.microbatches
        self.few = replace(space.problem, microbatches=min(max(FEW * p, 8), microbatches))
        self.fewer = min(max(FEWER * p, 4), microbatches)
        self.known: dict[Cut, float] = {}
        self.roomy = with_room(space, np.full((2, space.tables.n), max(1.0, ENOUGH * p)))

    def floor(self, cut: Cut) -> float:
        """A lower bound on the objective of the cut: the work of the most loaded rank."""
        return self.space.problem.microbatches * self.space.worst_load(cut)

    def value(self, cut: Cut) -> float:
        """An estimate of the objective that the search will reach; inf if no order was constructed."""
        if cut not in self.known:
            self.known[cut] = self._construct(cut)
        return self.known[cut]

    def _construct(self, cut: Cut) -> float:
        problem = self.few.cut_into(self.space.placement, cut)
        value, each = self._best(problem), self.space.worst_load(cut)
        more = self.space.problem.microbatches - problem.microbatches
        if more > 0 and self.roomy.excess(cut) > 0 and np.isfinite(value):
            between = problem.microbatches - self.fewer
            each = max(each, (value - self._best(replace(problem, microbatches=self.fewer))) / between)
        return float(value + more * each)

    def _best(self, problem: Problem) -> float:
        """The best objective of a few orders of a cut; inf if no order was constructed."""
        best = np.inf
        if problem.placement.kind == "v":
            for attempt in islice(get_v_schedule(problem), GREEDY_ORDERS):
                best = min(best, attempt.value)
            self.placed += GREEDY_ORDERS * GREEDY_COST * problem.max_actions
        scheduler, caps = ListScheduler(problem), in_flight_caps(problem)
        for preference, share, patience in RULES:
            rule = simple_rule(problem, preference, share, patience, caps)
            best = min(best, scheduler.value(rule, most=best))
        self.placed += len(RULES) * problem.max_actions
        return float(best)
