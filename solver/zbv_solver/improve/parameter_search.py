"""Search over the parameters of the constructors: priorities, in-flight caps, patience for W's, allowances.

A rule decides a whole order, so a change of one parameter moves thousands of actions at once. Where memory
is tight or stages are uneven, this finds more than any local change of an order. The search draws random
rules first, and then climbs from the best ones, with sideways steps. Its budget is counted in placed actions,
so it gives the same result on every machine. Many microbatches only repeat the steady state, so parameters
are tuned with few and then used with many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from zbv_solver.construct.board import Attempt
from zbv_solver.construct.dispatch import ListScheduler
from zbv_solver.construct.greedy_v import GREEDY_COST, GreedyParameters, GreedyV
from zbv_solver.construct.rules import (
    ENTRY_RULES,
    PEAKS,
    PHASES,
    Rule,
    changed,
    entry_rule,
    in_flight_caps,
    mountain,
    no_delay,
)
from zbv_solver.construct.tables import fuse_options, memory_for_activations, sizes
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.problem import Problem

PATIENCE = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
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
            rules.start_from(entry_rule(problem, each), 0)
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
        self.caps = in_flight_caps(problem)
        self.size, self.ascending = sizes(problem), np.arange(problem.microbatches)
        self.best = np.inf
        self.basins: list[tuple[float, Rule, int]] = []
        self.last = self.evaluation = self.placed = 0
        self.rule: Rule | None = None

    def step(self, used: float) -> bool:
        """Evaluate a random rule, or a neighbour of a basin's best rule."""
        self.evaluation += 1
        if used < EXPLORATION or not self.basins:
            basin = None
            rule, self.last = self._entering(self.fresh()), int(self.random.integers(len(self.options)))
            # Once all basins are taken, a random rule must be better than the worst of them to be kept, so
            # the scheduler may abandon it as soon as it is certainly worse.
            most = self.basins[-1][0] if len(self.basins) == self.most_basins else np.inf
        else:
            basin = self.evaluation % len(self.basins) if used < RACE else 0
            most, rule, self.last = self.basins[basin]
            rule = self.varied(rule, COARSE if used < RACE else FINE)
        scheduler = self.options[self.last][1]
        self.rule, value = rule, scheduler.value(rule, most)
        self.placed += scheduler.placed
        # Equal values replace the rule of a basin: sideways steps lead out of plateaus.
        if value <= most and value < np.inf:
            self._keep(value, rule, basin)
        improved, self.best = value < self.best, min(value, self.best)
        return improved

    def start_from(self, rule: Rule, option: int) -> None:
        """Evaluate a rule that is known to be good, and climb from it if it is among the best."""
        most = self.basins[-1][0] if len(self.basins) == self.most_basins else np.inf
        scheduler = self.options[option][1]
        value, self.last = scheduler.value(rule, most), option
        self.placed += scheduler.placed
        if value <= most and value < np.inf:
            self._keep(value, rule, None)
        self.best = min(value, self.best)

    def _keep(self, value: float, rule: Rule, basin: int | None) -> None:
        """Replace the rule of a basin, or add a random rule to the basins; keep the best."""
        if basin is not None:
            self.basins.pop(basin)
        self.basins.append((value, rule, self.last))
        self.basins.sort(key=lambda kept: kept[0])  # stable: of two equal rules, the earlier one comes first
        self.basins = self.basins[: self.most_basins]

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

    def fresh(self) -> Rule:
        """A random rule: any priorities; caps and targets linear from the first rank to the last."""
        random, p, chunks = self.random, self.problem.pp_degree, self.problem.placement.chunks
        kinds = 3 * chunks
        priority = np.empty((p, PHASES, kinds))
        priority[:] = random.permutation(kinds)
        if random.random() < 0.5:
            priority[:, PHASES - 1] = random.permutation(kinds)
        most = int(self.caps.max())
        cap = np.round(random.uniform(0.4, 1.3) * _line(random, 0.6, 1.1, p) * most)
        caps = np.stack([cap, cap], axis=1)
        if random.random() < 0.2:
            caps[:] = 2 * p + 2  # no cap but memory
        elif random.random() < 0.3:
            caps[:, 0] = np.round(cap * random.uniform(1.0, 1.5))
        target = np.stack([_line(random, 0.0, 1.0, p) * most for _ in range(chunks)], axis=1)
        patience = np.full((p, PHASES), random.choice(PATIENCE))
        if random.random() < 0.5:
            patience[:, PHASES - 1] = random.choice(PATIENCE)
        return Rule(
            priority,
            np.round(target).astype(np.int64),
            np.maximum(1, caps).astype(np.int64),
            patience,
            np.full(p, np.inf),
            self.ascending,
            np.full(p, np.inf),
            np.empty(0),
            no_delay(self.problem),
        )

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
            return self.neighbour(rule, whole)
        if self.random.random() < DEFERS:
            defer = rule.defer.copy()
            defer[_some_ranks(self.random, len(defer), whole)] = self.random.choice(DEFERENCE)
            return rule._replace(defer=defer)
        if self.random.random() < ROOMS and self.problem.memory.limit is not None:
            ranks, room = _some_ranks(self.random, len(rule.room), whole), rule.room.copy()
            room[ranks] = self._room(self.random.uniform(0.6, 1.1))[ranks]
            return rule._replace(room=room)
        return rule._replace(entry=changed(rule.entry, self.random, entered))

    def neighbour(self, rule: Rule, whole: float) -> Rule:
        """A copy with one to three changes, each on adjacent ranks, or on all with probability ``whole``."""
        random = self.random
        priority, target = rule.priority.copy(), rule.target.copy()
        cap, patience = rule.cap.copy(), rule.patience.copy()
        for _ in range(1 + int(random.random() < 0.3) + int(random.random() < 0.1)):
            ranks = _some_ranks(random, len(cap), whole)
            kind, phase = random.integers(7), int(random.integers(PHASES))
            if kind == 0:
                priority[ranks, phase] = random.permutation(priority.shape[2])
            elif kind == 1:
                one, other = random.integers(priority.shape[2], size=2)
                priority[ranks, phase, one], priority[ranks, phase, other] = (
                    priority[ranks, phase, other].copy(),
                    priority[ranks, phase, one].copy(),
                )
            elif kind == 2:
                patience[ranks, phase] = random.choice(PATIENCE)
            elif kind <= 4:
                phases = slice(0, 2) if random.random() < 0.5 else slice(phase % 2, phase % 2 + 1)
                cap[ranks, phases] = np.maximum(1, cap[ranks, phases] + random.choice((-2, -1, 1, 2)))
            else:
                target[ranks, random.integers(target.shape[1])] += random.choice((-2, -1, 1, 2))
        return rule._replace(priority=priority, target=target, cap=cap, patience=patience)


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
        ranks, kind = _some_ranks(random, p, FINE), random.integers(6)
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


def _line(random: np.random.Generator, low: float, high: float, p: int) -> FloatArray:
    """Values (p,) between two random ends, linear in the rank."""
    first, last = random.uniform(low, high, 2)
    values: FloatArray = np.linspace(first, last, p)
    return values


def _some_ranks(random: np.random.Generator, p: int, whole: float) -> slice:
    """Adjacent ranks: often one to three, sometimes more; all with the given probability."""
    if random.random() < whole:
        return slice(0, p)
    longest = p if random.random() < 0.4 else min(3, p)
    begin = int(random.integers(p))
    return slice(begin, begin + int(random.integers(1, longest + 1)))
