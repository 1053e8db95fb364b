"""Suffix search: keep the beginning of an order, and let a rule place the rest.

The structured greedy is good at the steady state, but leaves to chance how the pipeline drains. So a random
time cuts the best order; everything that starts earlier is kept, and list scheduling with some rule places
the rest (a large neighbourhood in the sense of Shaw 1998, with a rule as its repair).

The order remembers which rule placed it from which cut on. Most often a neighbour of the rule at the cut is
tried. So a single rule becomes, step by step, a sequence of rules, each tuned to its stretch of time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zbv_solver.construct.board import Attempt, from_orders
from zbv_solver.construct.rules import Rule, changed
from zbv_solver.improve.parameter_search import ENTRIES, FINE, RuleClimber
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, Problem
from zbv_solver.timing.start_times import earliest_times

FRESH, RECENT = 0.2, 0.2
"""Shares of random rules, and of neighbours of rules that recently did well at any cut. The others are
neighbours of the rule at the cut."""
SHORT = 0.03
"""A rule that placed less than this share of the order, without a gain, is not remembered."""
TRIES = 4
"""Number of rules tried at one cut."""
REMEMBERED = 5


def rest_search(
    problem: Problem,
    orders: Orders,
    placements: int,
    seed: int = 0,
    halt: IntArray | None = None,
    rule: Rule | None = None,
) -> Iterator[Attempt | None]:
    """Better and better attempts, and None after every evaluation without one (so that the caller can poll).

    Parameters
    ----------
    orders
        A verified order with ascending microbatches.
    placements, seed, halt
        As in :func:`~.parameter_search.parameter_search`.
    rule
        The rule that placed the order, if one rule did.
    """
    climber = RestClimber(RuleClimber(problem, seed, halt), orders, rule)
    while climber.placed < placements:
        yield climber.found if climber.step() else None


class RestClimber:
    """Climbs from an order by placing its rest with other rules."""

    def __init__(self, rules: RuleClimber, orders: Orders, rule: Rule | None = None):
        self.rules, self.problem, self.random = rules, rules.problem, rules.random
        self.found = Attempt.retimed("start", self.problem, *from_orders(orders, self.problem))
        self.cut = 0.0
        self.kept: IntArray = np.zeros(self.problem.pp_degree, np.int64)
        self.laid: list[tuple[float, Rule | None]] = [(0.0, rule)]
        self.pool: list[Rule] = []
        self.placed = self.evaluation = 0

    @property
    def best(self) -> float:
        """Objective of the best order at earliest start."""
        return self.found.value

    def step(self) -> bool:
        """Try one rule after a cut; whether the order got better."""
        self.evaluation += 1
        if self.evaluation % TRIES == 1:
            self.cut = self.random.uniform(0.0, self.found.makespan)
            # Everything that starts before the cut is kept. Inputs start no later than the actions that need
            # them, so the kept part can run without the rest. It stays valid for all tries at this cut: an
            # accepted order has the same kept part.
            self.kept = np.array([int(np.searchsorted(start, self.cut)) for start in _starts(self.found)])
        rule = self._rule()
        if not self.problem.is_equal:
            rule = self._from_here(rule)
        option = int(self.random.integers(len(self.rules.options)))
        name, scheduler = self.rules.options[option]
        value = scheduler.value(rule, self.best, (self.found.code, self.kept))
        self.placed += scheduler.placed
        if value > self.best:
            return False
        improved = value < self.best
        method = f"parameters(rest,fuse={name},evaluation={self.evaluation})"
        # An order as good as the best one replaces it: sideways steps lead out of plateaus.
        self.found = Attempt.of(
            method if improved else self.found.method, self.problem, scheduler.tables, scheduler.board
        )
        if improved or self.cut < (1 - SHORT) * self.found.makespan:
            # The new rule governs from the cut on, so it replaces all entries from there.
            self.laid = [*(kept for kept in self.laid if kept[0] < self.cut), (self.cut, rule)]
        self.pool = [*self.pool[-REMEMBERED + 1 :], rule]
        return improved

    def _from_here(self, rule: Rule) -> Rule:
        """The rule with the found order of entry up to the cut, and most often the same one after it."""
        entry, first = self.found.entry, self.problem.placement.rank_of[0]
        code = self.found.code[first, : self.kept[first]]
        chunk = self.problem.placement.chunk_of[0]
        if self.random.random() < ENTRIES:
            entry = changed(entry, self.random, int(np.count_nonzero(code == 4 * chunk + F)))
        return rule._replace(entry=entry)

    def _rule(self) -> Rule:
        """A rule to try after the cut."""
        draw = self.random.random()
        if self.pool and draw < RECENT:
            return self.rules.neighbour(self.pool[self.random.integers(len(self.pool))], FINE)
        governing = [rule for begin, rule in self.laid if begin <= self.cut][-1]
        if governing is None or draw > 1 - FRESH:
            return self.rules.fresh()
        return self.rules.neighbour(governing, FINE)


def _starts(attempt: Attempt) -> list[FloatArray]:
    """Start times of every rank's actions, in order."""
    start, _ = earliest_times(attempt.problem, attempt.orders)
    return [start[attempt.orders.slice_of(rank)] for rank in range(attempt.problem.pp_degree)]
