"""Search over the parameters of the constructors: priorities, in-flight caps, patience for W's, allowances.

A rule decides a whole order, so a change of one parameter moves thousands of actions at once. Where memory
is tight or stages are uneven, this finds more than any local change of an order. The search draws random
rules first, and then climbs from the best ones, with sideways steps. Its budget is counted in placed actions,
so it gives the same result on every machine. Many microbatches only repeat the steady state, so parameters
are tuned with few and then used with many.

The search of the rest of an order follows. The structured greedy is good at the steady state, but leaves to
chance how the pipeline drains. So a random time cuts the best order; everything that starts earlier is kept,
and list scheduling with some rule places the rest (a large neighbourhood in the sense of Shaw 1998, with a
rule as its repair). The order remembers which rule placed it from which cut on. Most often a neighbour of the
rule at the cut is tried. So a single rule becomes, step by step, a sequence of rules, each tuned to its
stretch of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from zbv_solver.construct.board import Attempt, from_orders
from zbv_solver.construct.dispatch import ListScheduler
from zbv_solver.construct.greedy_v import GREEDY_COST, GreedyParameters, GreedyV
from zbv_solver.construct.rules import (
    ENTRY_RULES,
    PEAKS,
    Rule,
    changed,
    entry_rule,
    mountain,
    neighbour,
    random_rule,
    some_ranks,
)
from zbv_solver.construct.tables import fuse_options, memory_for_activations, sizes
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, Problem
from zbv_solver.timing.start_times import earliest_times

EXPLORATION = 0.12
"""Share of the budget for random parameters."""
COARSE, FINE = 0.3, 0.1
"""Probability that a change concerns all ranks: while basins race, and after that."""
BASINS, FEW_BASINS = 3, 1
"""Number of random rules to climb from, and the number if the budget is below ``FEW_ORDERS`` orders."""
FEW_ORDERS = 500
RACE = 0.5
"""Share of the budget after which the search climbs from the best rule only."""
AHEAD, FAR_AHEAD, FAR = 2 / 3, 0.9, 1.03
"""Shares of the budget for the leading climber, and the ratio from which it is far ahead."""
FEW_MICROBATCHES = 4
"""Times p: with more microbatches than this, parameters are tuned with this many."""
ENTRIES, ROOMS, DEFERS = 0.5, 0.15, 0.15
"""Where microbatches differ: share of changes that concern their order of entry, the share of memory that
they may use, or how much larger ones they defer to; and shares of the latter two among these."""
DEFERENCE = np.array([1.2, 1.4, 2.0, 3.0, 6.0, np.inf])
FINALISTS = 6
"""Number of parameter sets, tuned with few microbatches, that are tried with all of them."""
FRESH, RECENT = 0.2, 0.2
"""Shares of random rules, and of neighbours of rules that recently did well at any cut. The others are
neighbours of the rule at the cut."""
SHORT = 0.03
"""A rule that placed less than this share of the order, without a gain, is not remembered."""
TRIES = 4
"""Number of rules tried at one cut."""
REMEMBERED = 5


def parameter_search(
    problem: Problem,
    placements: int,
    seed: int = 0,
    halt: IntArray | None = None,
    spent: Callable[[], float] = lambda: 0.0,
) -> Iterator[Attempt | None]:
    """Better and better attempts, and None after every evaluation without one (so that the caller can poll).

    Parameters
    ----------
    placements
        Number of actions that all evaluations together may place.
    halt
        (1,) uint8: another thread sets it to end the current evaluation.
    spent
        Share of the time limit that has passed; the search narrows down accordingly.
    """
    small = at_few_microbatches(problem)
    few = small.microbatches
    # Reserve the cost of running the finalists with all microbatches.
    if few < problem.microbatches:
        placements -= FINALISTS * problem.max_actions
    if placements <= 0:
        return
    basins = BASINS if placements >= FEW_ORDERS * small.max_actions else FEW_BASINS
    rules = RuleClimber(small, seed, halt, basins)
    if not problem.is_equal:
        for each in ENTRY_RULES:
            rules.evaluate(entry_rule(problem, each), 0)
    climbers: list[RuleClimber | GreedyClimber] = [rules]
    if problem.placement.kind == "v":
        climbers.append(GreedyClimber(small, seed, halt))
    best = np.inf
    while (used := max(spent(), sum(climber.placed for climber in climbers) / placements)) < 1:
        climber = climbers[_turn(used, climbers)]
        improved = climber.step(used)
        if improved and climber.best < best and few == problem.microbatches:
            best = climber.best
            yield climber.attempt()
        else:
            yield None
    if few < problem.microbatches:
        for climber in climbers:
            for attempt in climber.finalists(problem):
                if attempt.value < best:
                    best = attempt.value
                    yield attempt


def at_few_microbatches(problem: Problem) -> Problem:
    """The problem with the few microbatches that parameters are tuned with."""
    few = max(FEW_MICROBATCHES * problem.pp_degree, 8)
    # Microbatches that differ are not periodic.
    return (
        problem if problem.microbatches <= few or not problem.is_equal else replace(problem, microbatches=few)
    )


def _turn(used: float, climbers: list[RuleClimber | GreedyClimber]) -> int:
    """Index of the climber whose turn it is: equal shares at first, later most for the leading one."""
    if len(climbers) == 1:
        return 0
    rules, greedy = climbers[0].best, climbers[1].best
    share = 0.5
    if used > 2 * EXPLORATION:
        ahead = FAR_AHEAD if max(rules, greedy) > min(rules, greedy) * FAR else AHEAD
        share = ahead if greedy < rules else 1 - ahead
    return int(climbers[1].placed < share * (climbers[0].placed + climbers[1].placed))


class RuleClimber:
    """Climbs over the rules of list scheduling."""

    def __init__(self, problem: Problem, seed: int, halt: IntArray | None = None, most_basins: int = BASINS):
        self.problem, self.halt, self.most_basins = problem, halt, most_basins
        self.random = np.random.default_rng(seed)
        self.options = [(name, ListScheduler(problem, fuse, halt)) for name, fuse in fuse_options(problem)]
        self.size = sizes(problem)
        self.best = np.inf
        self.basins: list[tuple[float, Rule, int]] = []
        self.last = self.evaluation = self.placed = 0
        self.rule: Rule | None = None

    def step(self, used: float) -> bool:
        """Evaluate a random rule, or a neighbour of a basin's best rule; whether it is the best so far."""
        self.evaluation += 1
        if used < EXPLORATION or not self.basins:
            rule = self._entering(random_rule(self.problem, self.random))
            return self.evaluate(rule, int(self.random.integers(len(self.options))))
        basin = self.evaluation % len(self.basins) if used < RACE else 0
        _, rule, option = self.basins[basin]
        return self.evaluate(self.varied(rule, COARSE if used < RACE else FINE), option, basin)

    def evaluate(self, rule: Rule, option: int, basin: int | None = None) -> bool:
        """Evaluate a rule in place of that of a basin, or in addition; the best ones become basins."""
        # Once all basins are taken, another rule must be better than the worst of them to be kept, so the
        # scheduler may abandon it as soon as it is certainly worse.
        is_full = len(self.basins) == self.most_basins
        most = self.basins[-1 if basin is None else basin][0] if basin is not None or is_full else np.inf
        scheduler = self.options[option][1]
        self.rule, self.last, value = rule, option, scheduler.value(rule, most)
        self.placed += scheduler.placed
        # Equal values replace the rule of a basin: sideways steps lead out of plateaus.
        if value <= most and value < np.inf:
            if basin is not None:
                self.basins.pop(basin)
            self.basins.append((value, rule, option))
            self.basins.sort(key=lambda kept: kept[0])  # stable: of equal rules, the earlier one comes first
            self.basins = self.basins[: self.most_basins]
        improved, self.best = value < self.best, min(value, self.best)
        return improved

    def attempt(self) -> Attempt:
        """The order of the last evaluation."""
        name, scheduler = self.options[self.last]
        method = f"parameters(rule,fuse={name},evaluation={self.evaluation})"
        return Attempt.of(method, self.problem, scheduler.tables, scheduler.board, self.rule)

    def finalists(self, problem: Problem) -> Iterator[Attempt]:
        """The best rules with more microbatches."""
        fuses = fuse_options(problem)
        for _, rule, option in self.basins:
            name, fuse = fuses[option]
            scheduler = ListScheduler(problem, fuse, self.halt)
            method = f"parameters(rule,fuse={name},tuned_at={self.problem.microbatches})"
            attempt = scheduler.attempt(rule._replace(entry=np.arange(problem.microbatches)), method)
            if attempt is not None:
                yield attempt

    def _entering(self, rule: Rule) -> Rule:
        """A random rule with a random order of entry and share of memory, where microbatches differ."""
        if self.problem.is_equal:
            return rule
        noise = np.exp(0.3 * self.random.random() * self.random.normal(size=len(self.size)))
        peak = float(self.random.choice((*PEAKS, self.random.uniform(0.2, 1.0))))
        share = 1.0 if self.random.random() < 0.4 else self.random.uniform(0.6, 1.0)
        defer = np.full(self.problem.pp_degree, self.random.choice(DEFERENCE))
        return rule._replace(entry=mountain(self.size * noise, peak), room=self._room(share), defer=defer)

    def _room(self, share: float) -> FloatArray:
        """A share of the memory of every rank, (p,)."""
        return self.problem.arrays.static + share * memory_for_activations(self.problem)

    def varied(self, rule: Rule, whole: float, entered: int = 0) -> Rule:
        """A neighbour of the rule, in its order of entry from a place on, or in its other parameters."""
        if self.problem.is_equal or self.random.random() > ENTRIES:
            return neighbour(rule, self.random, whole)
        if self.random.random() < DEFERS:
            defer = rule.defer.copy()
            defer[some_ranks(self.random, len(defer), whole)] = self.random.choice(DEFERENCE)
            return rule._replace(defer=defer)
        if self.random.random() < ROOMS and self.problem.memory.limit is not None:
            ranks, room = some_ranks(self.random, len(rule.room), whole), rule.room.copy()
            room[ranks] = self._room(self.random.uniform(0.6, 1.1))[ranks]
            return rule._replace(room=room)
        return rule._replace(entry=changed(rule.entry, self.random, entered))


class GreedyClimber:
    """Climbs over the parameters of the greedy V."""

    def __init__(self, problem: Problem, seed: int, halt: IntArray | None = None):
        self.problem, self.halt = problem, halt
        self.random = np.random.default_rng(seed + 1)
        self.options = [(name, GreedyV(problem, fuse, halt=halt)) for name, fuse in fuse_options(problem)]
        self.unit = float(self.options[0][1].tables.duration.max())
        self.best = np.inf
        self.pool: list[tuple[float, GreedyParameters, int]] = []
        self.last = self.evaluation = self.placed = 0

    def step(self, used: float) -> bool:
        """Evaluate the published parameters first, and then neighbours of the best ones."""
        self.evaluation += 1
        peaks = PEAKS[:1] if self.problem.is_equal else PEAKS
        first = 4 * len(self.options) * len(peaks)
        if self.evaluation <= first or not self.pool:
            number, fills = divmod((self.evaluation - 1) % first, 4)
            self.last, peak = number % len(self.options), peaks[number // len(self.options)]
            parameters = self.options[self.last][1].default(bool(fills & 1), bool(fills & 2), peak)
        else:
            _, parameters, self.last = self.pool[-1]
            parameters = self._neighbour(parameters)
        greedy = self.options[self.last][1]
        complete = greedy.lay(parameters)
        self.placed += GREEDY_COST * int(greedy.board.length.sum())
        if not complete:
            return False
        value = greedy.board.value(self.problem)
        improved = value < self.best
        if value <= self.best:
            self.best = value
            self.pool = [*self.pool[-FINALISTS + 1 :], (value, parameters, self.last)]
        return improved

    def attempt(self) -> Attempt:
        """The order of the last evaluation."""
        name, greedy = self.options[self.last]
        return greedy.attempt(f"parameters(greedy-v,fuse={name},evaluation={self.evaluation})")

    def finalists(self, problem: Problem) -> Iterator[Attempt]:
        """The latest best parameters with more microbatches."""
        fuses = fuse_options(problem)
        for _, parameters, option in reversed(self.pool):
            name, fuse = fuses[option]
            greedy = GreedyV(problem, fuse, halt=self.halt)
            # The surplus is a difference of loads, which grow with the number of microbatches.
            share = problem.microbatches / self.problem.microbatches
            if greedy.lay(
                parameters._replace(surplus=parameters.surplus * share, entry=np.arange(problem.microbatches))
            ):
                yield greedy.attempt(f"parameters(greedy-v,fuse={name},tuned_at={self.problem.microbatches})")

    def _neighbour(self, parameters: GreedyParameters) -> GreedyParameters:
        """A copy with one parameter changed on adjacent ranks, or with another order of entry."""
        random, p = self.random, self.problem.pp_degree
        if not self.problem.is_equal and random.random() < ENTRIES:
            return parameters._replace(entry=changed(parameters.entry, random))
        ranks, kind = some_ranks(random, p, FINE), random.integers(6)
        if kind == 0:
            limit = parameters.warm_up_limit.copy()
            own = self.options[self.last][1].tables.limit[ranks]
            limit[ranks] = own * random.uniform(0.5, 1.5)
            return parameters._replace(warm_up_limit=limit)
        if kind == 1:
            return parameters._replace(fill_forward=not parameters.fill_forward)
        if kind == 2:
            return parameters._replace(fill_backward=not parameters.fill_backward)
        if kind == 3:
            allowance = parameters.allowance.copy()
            allowance[ranks] = random.uniform(0, 3) * self.unit * random.choice((0, 1, 3, p))
            return parameters._replace(allowance=allowance)
        surplus = parameters.surplus.copy()
        change = random.normal() * self.unit * random.choice((0.3, 1, p))
        surplus[ranks] = np.maximum(0.0, surplus[ranks] + change)
        return parameters._replace(surplus=surplus)


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
        As in :func:`parameter_search`.
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
            start, _ = earliest_times(self.problem, self.found.orders)
            parts = map(self.found.orders.slice_of, range(self.problem.pp_degree))
            self.kept = np.array([np.searchsorted(start[part], self.cut) for part in parts])
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
            return neighbour(self.pool[self.random.integers(len(self.pool))], self.random, FINE)
        governing = [rule for begin, rule in self.laid if begin <= self.cut][-1]
        if governing is None or draw > 1 - FRESH:
            return random_rule(self.problem, self.random)
        return neighbour(governing, self.random, FINE)
