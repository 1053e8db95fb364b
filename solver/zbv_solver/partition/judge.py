"""What the constructors make of a cut, at few microbatches: how cuts are told apart while searching."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from zbv_solver.construct.greedy_v import GREEDY_COST, get_v_schedule
from zbv_solver.construct.list_scheduling import ListScheduler, simple_rule
from zbv_solver.partition.cut_space import Bounds, CutSpace
from zbv_solver.partition.roomy_cuts import with_room
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem

FEW, FEWER = 2, 1
"""Times p: microbatches at which cuts are judged; more of them only repeat the steady state.

Where memory is short, what a microbatch of it takes is more than the most loaded rank's work, and is told
from the difference between the two.
"""
ENOUGH = 0.75
"""Times p: microbatches on all stages of a rank for which there is room where memory is not short."""
GREEDY_ORDERS = 4
RULES = (
    ("backward-deep", 1.0, 0.5),
    ("backward-deep", 0.75, 0.5),
    ("backward-shallow", 1.0, 0.5),
    ("forward-deep", 1.0, 0.5),
)


class Judge:
    """Judges cuts of one space, each once, and counts what that costs.

    Attributes
    ----------
    placed
        Actions placed so far.
    """

    def __init__(self, space: CutSpace):
        self.space, self.placed = space, 0
        p, microbatches = space.problem.pp_degree, space.problem.microbatches
        self.few = replace(space.problem, microbatches=min(max(FEW * p, 8), microbatches))
        self.fewer = replace(space.problem, microbatches=min(max(FEWER * p, 4), microbatches))
        self.known: dict[tuple[Bounds, tuple[bool, ...]], float] = {}
        self.roomy = with_room(space, np.full((2, space.tables.n), max(1.0, ENOUGH * p)))

    def floor(self, bounds: Bounds, recompute: tuple[bool, ...]) -> float:
        """What no order of the cut can beat: the most loaded rank's work."""
        return self.space.problem.microbatches * self.space.worst_load(bounds, recompute)

    def value(self, bounds: Bounds, recompute: tuple[bool, ...]) -> float:
        """An estimate of the objective that the search will reach; inf where nothing was constructed."""
        key = (bounds, recompute)
        if key not in self.known:
            self.known[key] = self._construct(bounds, recompute)
        return self.known[key]

    def _construct(self, bounds: Bounds, recompute: tuple[bool, ...]) -> float:
        cut, problem = self.space.cut(bounds, recompute), self.space.problem
        value, each = self._best(self.few, cut), self.space.worst_load(bounds, recompute)
        more = problem.microbatches - self.few.microbatches
        if more > 0 and self.roomy.excess(bounds, recompute) > 0 and np.isfinite(value):
            between = self.few.microbatches - self.fewer.microbatches
            each = max(each, (value - self._best(self.fewer, cut)) / between)
        return float(value + more * each)

    def _best(self, layered: LayeredProblem, cut: Cut) -> float:
        """The best of a few orders for a cut; inf where none was constructed."""
        problem = layered.cut_into(self.space.placement, cut)
        best = np.inf
        if problem.placement.kind == "v":
            for attempt in islice(get_v_schedule(problem), GREEDY_ORDERS):
                best = min(best, attempt.value)
            self.placed += GREEDY_ORDERS * GREEDY_COST * problem.max_actions
        scheduler = ListScheduler(problem)
        for preference, share, patience in RULES:
            best = min(best, scheduler.value(simple_rule(problem, preference, share, patience), most=best))
        self.placed += len(RULES) * problem.max_actions
        return float(best)
