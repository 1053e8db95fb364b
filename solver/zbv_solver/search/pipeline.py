"""The stages of a search: construct, tune, inject, overtake, anneal, improve by CP-SAT, prove."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

from zbv_solver.bounds import BoundEffort, lower_bound
from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.rules import first_rule, in_flight_caps
from zbv_solver.improve.annealing import COOLER, LEVELS, anneal_in_rounds
from zbv_solver.improve.injection_search import injection_search
from zbv_solver.improve.overtaking_search import large_ones, overtaking_search
from zbv_solver.improve.parameter_search import FINALISTS, at_few_microbatches, parameter_search
from zbv_solver.improve.rest_search import rest_search
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.halt import Turn
from zbv_solver.search.options import SearchOptions, budgets_of
from zbv_solver.search.search_state import CHAINS, Cancelled, Found, OnProgress, SearchState
from zbv_solver.timing.start_times import objective_of

OVERTAKE_SHARE = 0.375
"""Placements of the search with overtaking, as a share of those of the search for injections."""
REST_SHARE = 0.5
"""Share of the tuning budget that is spent on suffix search."""
TUNE_SHARE, TIGHT_TUNE_SHARE, INJECT_SHARE, ANNEAL_SHARE = 0.8, 0.4, 0.6, 0.8
"""Shares of the remaining time limit for these stages."""
ROUNDS = 12
"""Rounds of annealing of one start, at most."""
SEVERAL = 2
"""Times the most moves of annealing, if these are divided among several starts."""
LEAST_MOVES = 1_300
"""A start is given at least as many moves, or none."""
FIRST_ATTEMPTS = 8
"""Orders that are constructed for a problem of any size."""


class Pipeline(SearchState):
    """One search, stage after stage.

    Attributes
    ----------
    budgets, budget
        How long every stage may run, for one run of all stages after another; and the current one.
    starts
        The best orders of all runs of tuning and of the search for injections; annealing starts from these.
    finalists
        The orders that several starts of annealing end with, if it had several.
    is_tight
        Whether memory has space for few microbatches in flight.
    """

    def __init__(
        self,
        problem: Problem,
        options: SearchOptions,
        on_progress: OnProgress | None,
        cancelled: Cancelled | None,
    ):
        super().__init__(problem, options, on_progress, cancelled)
        self.budgets = budgets_of(options.effort, problem)
        self.budget = self.budgets[0]
        self.starts: list[Found] = []
        self.finalists: list[Found] = []
        # Where microbatches differ, memory is tight while large ones are in flight.
        few = in_flight_caps(self.problem).min() < self.budget.ample * self.problem.pp_degree
        self.is_tight = bool(few) or not problem.is_equal

    def run(self) -> None:
        """Run all stages, budget after budget, until the bound is met or the search is stopped."""
        self._run(("begin", self._begin), ("bound", self._bound))
        for budget in self.budgets:
            self.budget, self.starts, self.finalists = budget, [], []
            self._run(("construct", self._construct), ("tune", self._tune), ("inject", self._inject))
            before = self.found
            self._run(
                ("overtake", self._overtake),
                ("anneal", self._anneal),
                ("windows", self._windows),
                ("exact", self._refine),
            )
            if budget is not self.budgets[-1] and self.found is not None:
                # The later stages may have left the one order of entry, which the first ones need.
                self._set_aside(self.found)
                self.found = before

    def first_plan(self, enough: float) -> Plan:
        """A plan from constructed orders alone; it has a full bound if it is shorter than ``enough``."""
        self._run(("begin", self._begin), ("construct", self._construct))
        plan = self.finish()
        if plan.objective >= enough:
            return plan
        self._run(("bound", self._bound))
        return self.finish()

    def _run(self, *stages: tuple[str, Callable[[], None]]) -> None:
        """Run stages that the options do not leave out, until the search is over."""
        for name, stage in stages:
            if name not in self.options.without and not self._is_over():
                stage()

    def _begin(self) -> None:
        """Find a first order as quickly as possible."""
        self.bound = lower_bound(self.problem, effort="quick").value
        attempt = ListScheduler(self.problem).attempt(first_rule(self.problem), "list(first)") or serial(
            self.problem
        )
        if self._is_better(attempt.value):
            self._take(_of(attempt))

    def _bound(self) -> None:
        """Compute the full lower bound."""
        effort: BoundEffort = "full" if self.options.effort == "quick" else "thorough"
        enough = math.inf if self.found is None else self.found.value
        bound = lower_bound(self.problem, effort, enough, lambda: bool(self.halt.flag[0]))
        self._raise_bound(bound.value, "bounds")

    def _construct(self) -> None:
        """Construct greedy and list-scheduled orders alternately."""
        listed = priority_schedules(self.problem)
        attempts = listed
        # Where microbatches differ, the structured greedy does worse than lists.
        if self.problem.placement.kind == "v" and self.problem.is_equal:
            attempts = _in_turns(get_v_schedule(self.problem), listed)
        most = max(FIRST_ATTEMPTS, self.budget.constructed // self.problem.max_actions)
        for _, attempt in zip(range(most), attempts, strict=False):
            if self._is_better(attempt.value):
                self._take(_of(attempt))
            if self._is_over():
                return

    def _tune(self) -> None:
        """Search the parameters of constructors, then the suffix of the best order."""
        most = self.budget.most_tuned * at_few_microbatches(self.problem).max_actions
        most += CHAINS * 2 * FINALISTS * self.problem.max_actions if self.budget.most_tuned else 0
        placements = min(self.budget.tuned, most) // CHAINS
        rest = int(REST_SHARE * placements)

        def chain_of(number: int, turn: Turn) -> Iterator[Found | None]:
            seed, best, rule = self.options.seed * CHAINS + number, self.found, None
            tuned = partial(turn.spent, 1 - REST_SHARE)
            for attempt in parameter_search(self.problem, placements - rest, seed, turn.flag, tuned):
                found = None if attempt is None else _of(attempt)
                if attempt is not None and (best is None or attempt.value < best.value):
                    best, rule = found, attempt.rule
                yield found
            if best is not None:
                for attempt in rest_search(self.problem, best.orders, rest, seed, turn.flag, rule):
                    yield None if attempt is None else _of(attempt)

        self.starts += self._race(chain_of, TIGHT_TUNE_SHARE if self.is_tight else TUNE_SHARE)

    def _inject(self) -> None:
        """Search the times at which microbatches enter, where memory is tight."""
        if not self.is_tight or len(large_ones(self.problem)) > 0:
            return
        placements = min(self.budget.injected, self.budget.most_injected * self.problem.max_actions)
        injected: list[list[Found]] = [[] for _ in range(CHAINS)]

        def chain_of(number: int, turn: Turn) -> Iterator[Found | None]:
            seed = self.options.seed * CHAINS + number
            for attempt in injection_search(self.problem, placements // CHAINS, seed, turn.flag):
                if attempt is not None:
                    injected[number].append(_of(attempt))
                yield None if attempt is None else _of(attempt)

        self._race(chain_of, INJECT_SHARE)
        self.starts += itertools.chain(*injected)

    def _overtake(self) -> None:
        """Let small microbatches overtake large ones, where the path of these decides."""
        if len(large_ones(self.problem)) == 0:
            return
        placements = int(OVERTAKE_SHARE * self.budget.injected) // CHAINS

        def chain_of(number: int, turn: Turn) -> Iterator[Found | None]:
            seed = self.options.seed * CHAINS + number
            for found in overtaking_search(self.problem, placements, seed, turn.flag):
                yield None if found is None else Found(*found, "overtaking")

        self.starts += self._race(chain_of, INJECT_SHARE)

    def _anneal(self) -> None:
        """Move single actions: of the best order, or, where memory is tight, of all starts."""
        best, most = self.best(), self.budget.annealed // self.problem.max_actions
        if best is None:
            return
        starts = list({start.value: start for start in (*self.starts, best)}.values())
        moves = min(SEVERAL * self.budget.most_annealed, most)
        if self.is_tight and len(starts) > 1 and moves * LEVELS[0].share >= CHAINS * LEAST_MOVES:
            self._anneal_several(starts, moves)
        else:
            self._anneal_one(best, min(self.budget.most_annealed, most))

    def _anneal_one(self, start: Found, moves: int) -> None:
        """Anneal one order in both chains."""
        each = moves // (CHAINS * ROUNDS)
        if each < 1:
            return

        def chain_of(number: int, turn: Turn) -> Iterator[Found | None]:
            seed = (self.options.seed * CHAINS + number) * ROUNDS
            return _annealed(self.problem, start, ROUNDS, each, COOLER if number else 1.0, seed, turn)

        self._race(chain_of, ANNEAL_SHARE)

    def _anneal_several(self, starts: list[Found], moves: int) -> None:
        """Anneal all starts a little, and the best of them more."""
        done = 0.0
        for number, level in enumerate(LEVELS):
            if self._is_over():
                return
            starts.sort(key=lambda start: start.value)
            kept = min(level.kept, int(moves * level.share) // LEAST_MOVES)
            share = ANNEAL_SHARE * level.share / (1 - ANNEAL_SHARE * done)
            starts = self._anneal_level(starts[:kept], moves, number, share)
            done += level.share
        self.finalists = starts

    def _anneal_level(self, starts: list[Found], moves: int, number: int, share: float) -> list[Found]:
        """Anneal each start as one level says; the chains take turns. Returns the best of each."""
        level, ended = LEVELS[number], list(starts)
        each = int(moves * level.share) // (len(starts) * level.rounds)

        def chain_of(chain: int, turn: Turn) -> Iterator[Found | None]:
            for place in range(chain, len(starts), CHAINS):
                factor = level.factors[place % len(level.factors)]
                seed = ((self.options.seed * len(LEVELS) + number) * LEVELS[0].kept + place) * ROUNDS
                for found in _annealed(self.problem, starts[place], level.rounds, each, factor, seed, turn):
                    ended[place] = found
                    yield found

        self._race(chain_of, share)
        return ended

    def _windows(self) -> None:
        """Improve one window of time after another by CP-SAT, if the problem is small enough."""
        if self.problem.max_actions > self.budget.window_actions or self.found is None:
            return
        # Imported here because OR-Tools takes a second to import and many searches do not need it.
        from zbv_solver.improve.cp_search import sweep_windows

        starts = self.finalists or [self.found]
        if not self.problem.is_equal:
            # In any order of the microbatches, windows take longer, and other starts hardly gain.
            starts = [self.found] if self.aside is None else [self.found, self.aside]

        def chain_of(number: int, turn: Turn) -> Iterator[Found | None]:
            # The last chain takes the first start: a single worker gives it all the time that others leave.
            for start in starts[CHAINS - 1 - number :: CHAINS]:
                orders = sweep_windows(
                    self.problem,
                    start.orders,
                    effort=self.budget.window_time,
                    seed=self.options.seed,
                    time_limit=self._seconds_left(),
                    cancelled=lambda: self.halt.check() or bool(turn.flag[0]),
                )
                if orders is not None:
                    yield Found(objective_of(self.problem, orders), orders, "cp-sat windows")

        self._race(chain_of, 1.0)

    def _refine(self) -> None:
        """Solve the whole problem by CP-SAT, if it is small enough."""
        best = self.best()
        if self.problem.max_actions > self.budget.exact_actions or best is None:
            return
        from zbv_solver.improve.cp_search import Listener, refine  # late, as above

        refine(
            self.problem,
            best.orders,
            lower_bound=self.bound,
            effort=self.budget.exact_time,
            time_limit=self._seconds_left(),
            seed=self.options.seed,
            cancelled=self.halt.check,
            listener=Listener(
                on_solution=lambda orders, value: self._take(Found(value, orders, "cp-sat")),
                on_bound=lambda bound: self._raise_bound(bound, "cp-sat"),
            ),
        )


def _of(attempt: Attempt) -> Found:
    return Found(attempt.value, attempt.orders, attempt.method)


def _annealed(
    problem: Problem, start: Found, rounds: int, moves: int, factor: float, seed: int, turn: Turn
) -> Iterator[Found]:
    """The start or a better order after each round of annealing."""
    found = start
    for value, orders in anneal_in_rounds(
        problem,
        start.orders,
        start.value,
        rounds=rounds,
        moves=moves,
        factor=factor,
        seed=seed,
        halt=turn.flag,
    ):
        if value < found.value:
            found = Found(value, orders, "annealing")
        yield found


def _in_turns(*attempts: Iterator[Attempt]) -> Iterator[Attempt]:
    """Alternate between the iterators until all are exhausted."""
    waiting = list(attempts)
    while waiting:
        for iterator in list(waiting):
            attempt = next(iterator, None)
            if attempt is None:
                waiting.remove(iterator)
            else:
                yield attempt
