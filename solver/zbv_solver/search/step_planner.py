"""Plans one training step after another, where every step has other microbatches.

A search from scratch takes seconds; a step of training often takes no longer. So the planner keeps what it
has learned: the rules of list scheduling that were best in earlier steps, and the order of entry as a pattern
of sizes (the third smallest microbatch first, …), which applies to any batch. A step's plan begins with the
best of these rules, a hill climb goes on from there, and annealing uses the rest of the time. Batches whose
microbatches have the same features in another order get the same plan at once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zbv_solver.bounds import lower_bound
from zbv_solver.construct.board import Attempt
from zbv_solver.construct.dispatch import serial
from zbv_solver.construct.rules import ENTRY_RULES, Rule, entry_rule
from zbv_solver.construct.tables import mean_duration, sizes
from zbv_solver.errors import InvalidInput
from zbv_solver.improve.annealing import anneal
from zbv_solver.improve.parameter_search import RuleClimber
from zbv_solver.kernels.jit import IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import in_search_unit, make_plan

REMEMBERED, TRIED = 12, 4
"""Rules of earlier steps that a step begins with; how many of these if it has no time to search, and how many
general rules in any case."""
CACHED = 256
"""Batches whose plans are kept."""
CLIMB_SHARE = 0.5
"""Share of the time that the hill climb may use; annealing takes the rest."""
MOVES, COOL = 200, (0.03, 0.01, 0.0)
"""Moves of one round of annealing, and its temperatures in turn, as shares of the mean duration."""


@dataclass(frozen=True, eq=False)
class _Known:
    """A rule that was best in a step; ``pattern`` (m,) is its order of entry, by rank of size."""

    rule: Rule
    option: int
    pattern: IntArray

    def rule_of(self, by_size: IntArray) -> Rule:
        """The rule for a batch whose microbatches ``by_size`` (m,) are sorted; m may be another number."""
        return self.rule._replace(entry=by_size[stretched(self.pattern, len(by_size))])

    def is_same(self, other: _Known) -> bool:
        """Whether two rules differ in nothing; a rule keeps its arrays from batch to batch."""
        own, others = self.rule._replace(entry=self.pattern), other.rule._replace(entry=other.pattern)
        return self.option == other.option and all(map(np.array_equal, own, others))


class StepPlanner:
    """Plans the steps of a training run. Not for several threads at once.

    Parameters
    ----------
    problem
        A problem with features; every step has other values of them, and possibly another number of
        microbatches.
    seed
        Of the random choices. Plans also depend on the time that they are given.
    """

    def __init__(self, problem: Problem, *, seed: int = 0):
        if not problem.features:
            raise InvalidInput.at(
                "/features", "found none; a step planner needs a problem whose microbatches have features."
            )
        problem.require_feasible()
        self.problem, self.seed = problem, seed
        self.steps = 0
        self._known: list[_Known] = []
        self._plans: OrderedDict[bytes, tuple[IntArray, Orders]] = OrderedDict()

    def problem_of(self, values: Mapping[str, Sequence[float]]) -> Problem:
        """The problem of a step.

        Parameters
        ----------
        values
            One number per microbatch, by the names of the problem's features.

        Raises
        ------
        InvalidInput
            When a feature is missing or unknown, or a rule of problems is broken.
        """
        names = [feature.name for feature in self.problem.features]
        if sorted(names) != sorted(values):
            raise InvalidInput.at(
                "/features", f"found {', '.join(values) or 'none'}; must be {', '.join(names)}."
            )
        lengths = {len(each) for each in values.values()}
        if len(lengths) != 1:
            raise InvalidInput.at("/features", "found lists of different lengths; one number per microbatch.")
        features = tuple(
            replace(each, value=tuple(map(float, values[each.name]))) for each in self.problem.features
        )
        return replace(self.problem, microbatches=lengths.pop(), features=features)

    def first(self, values: Mapping[str, Sequence[float]]) -> Plan:
        """A verified plan within milliseconds: of the cache, or by the best rule of earlier steps."""
        return self.plan(values, seconds=0.0)

    def plan(self, values: Mapping[str, Sequence[float]], *, seconds: float = 0.2) -> Plan:
        """The best verified plan of a step that is found in so much time.

        Parameters
        ----------
        values
            See :meth:`problem_of`.
        seconds
            Time for the search. Reading the batch and verifying the plan come on top, a few milliseconds.

        Raises
        ------
        InvalidInput
            When the values break a rule.
        InfeasibleMemory
            When a microbatch does not fit the memory limit.
        """
        began = time.monotonic()
        given = self.problem_of(values)
        given.require_feasible()
        self.steps += 1
        problem, _ = in_search_unit(given)
        size = _ranked(given)
        key = b"".join(np.array(feature.value)[size].tobytes() for feature in given.features)
        cached = self._plans.get(key)
        if cached is not None:
            self._plans.move_to_end(key)
            by_rank, orders = cached
            orders = replace(orders, microbatch=size.astype(np.int32)[by_rank])
            return _plan(given, orders, "step(cached)", self.seed, began)
        attempt = self._constructed(problem, size, seconds, began + CLIMB_SHARE * seconds)
        orders, method = self._annealed(problem, attempt, began + seconds)
        plan = _plan(given, orders, method, self.seed, began)
        if seconds > 0:
            place = np.empty(given.microbatches, np.int64)
            place[size] = np.arange(given.microbatches)
            self._plans[key] = (place[orders.microbatch], orders)
            if len(self._plans) > CACHED:
                self._plans.popitem(last=False)
        return plan

    def _constructed(self, problem: Problem, size: IntArray, seconds: float, until: float) -> Attempt:
        """The order of the best rule: of earlier steps, of the first ones, or of a climb from these."""
        basins = 2 if seconds > 0 else 1
        climber = RuleClimber(problem, self.seed + self.steps, most_basins=basins)
        for known in self._known[: REMEMBERED if seconds > 0 else TRIED]:
            if known.option < len(climber.options):
                climber.evaluate(known.rule_of(size), known.option)
        for each in ENTRY_RULES[:TRIED]:
            climber.evaluate(entry_rule(problem, each), 0)
        while time.monotonic() < until:
            climber.step(1.0 if climber.basins else 0.0)
        if not climber.basins:
            return serial(problem)
        _, rule, option = climber.basins[0]
        self._remember(rule, option, size)
        name, scheduler = climber.options[option]
        attempt = scheduler.attempt(rule, f"step(rule,fuse={name})")
        return serial(problem) if attempt is None else attempt

    def _remember(self, rule: Rule, option: int, size: IntArray) -> None:
        """Put a rule first, so that it also leads when there is no time to compare."""
        place = np.empty(len(size), np.int64)
        place[size] = np.arange(len(size))
        newest = _Known(rule, option, place[rule.entry])
        others = [each for each in self._known if not each.is_same(newest)]
        self._known = [newest, *others[: REMEMBERED - 1]]

    def _annealed(self, problem: Problem, attempt: Attempt, until: float) -> tuple[Orders, str]:
        """The best order of rounds of annealing, as many as there is time for."""
        unit = mean_duration(problem)
        best, value, method = attempt.orders, attempt.value, attempt.method
        last, number = best, 0
        while time.monotonic() < until:
            result = anneal(
                problem,
                last,
                moves=MOVES,
                temperature=COOL[number % len(COOL)] * unit,
                seed=(self.seed + self.steps) * 1000 + number,
            )
            last, number = result.last, number + 1
            if result.value < value:
                best, value, method = result.orders, result.value, "step(annealing)"
        return best, method


def stretched(pattern: IntArray, m: int) -> IntArray:
    """An order of entry by rank of size, for another number of microbatches, (m,)."""
    if len(pattern) == m:
        return pattern
    places = np.linspace(0, len(pattern) - 1, m)
    wanted = np.interp(places, np.arange(len(pattern)), pattern)
    found = np.empty(m, np.int64)
    found[np.argsort(wanted, kind="stable")] = np.arange(m)
    return found


def _ranked(problem: Problem) -> IntArray:
    """The microbatches by their work, and by all features where that is equal, (m,)."""
    columns = [np.array(feature.value) for feature in problem.features]
    found: IntArray = np.lexsort([*columns, sizes(problem)])
    return found


def _plan(problem: Problem, orders: Orders, method: str, seed: int, began: float) -> Plan:
    """A verified plan without baselines, with the bound that takes the least time."""
    bound = lower_bound(problem, "quick").value
    return make_plan(
        problem, orders, method=method, lower_bound=bound, seed=seed, seconds=time.monotonic() - began
    )
