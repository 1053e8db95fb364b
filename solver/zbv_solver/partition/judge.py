"""Estimates of the objective of cuts, from orders that constructors make for few microbatches."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from zbv_solver.construct.dispatch import ListScheduler
from zbv_solver.construct.greedy_v import GREEDY_COST, get_v_schedule
from zbv_solver.construct.rules import in_flight_caps, simple_rule
from zbv_solver.partition.cut_space import Boundaries, CutSpace
from zbv_solver.partition.roomy_cuts import with_room
from zbv_solver.problem.problem import Problem

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
    """Estimates cuts of one space, each of them once, and counts the actions that this places.

    Attributes
    ----------
    placed
        Actions placed so far.
    """

    def __init__(self, space: CutSpace):
        self.space, self.placed = space, 0
        p, microbatches = space.problem.pp_degree, space.problem.microbatches
        self.few = replace(space.problem, microbatches=min(max(FEW * p, 8), microbatches))
        self.fewer = min(max(FEWER * p, 4), microbatches)
        self.known: dict[tuple[Boundaries, tuple[bool, ...]], float] = {}
        self.roomy = with_room(space, np.full((2, space.tables.n), max(1.0, ENOUGH * p)))

    def floor(self, bounds: Boundaries, recompute: tuple[bool, ...]) -> float:
        """A lower bound on the objective of the cut: the work of the most loaded rank."""
        return self.space.problem.microbatches * self.space.worst_load(bounds, recompute)

    def value(self, bounds: Boundaries, recompute: tuple[bool, ...]) -> float:
        """An estimate of the objective that the search will reach; inf if no order was constructed."""
        key = (bounds, recompute)
        if key not in self.known:
            self.known[key] = self._construct(bounds, recompute)
        return self.known[key]

    def _construct(self, bounds: Boundaries, recompute: tuple[bool, ...]) -> float:
        problem = self.few.cut_into(self.space.placement, self.space.cut(bounds, recompute))
        value, each = self._best(problem), self.space.worst_load(bounds, recompute)
        more = self.space.problem.microbatches - problem.microbatches
        if more > 0 and self.roomy.excess(bounds, recompute) > 0 and np.isfinite(value):
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
