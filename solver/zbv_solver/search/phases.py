"""The phases of a search, one after the other: construct, tune, inject, overtake, anneal, windows, exact."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

from zbv_solver.bounds import BoundEffort, lower_bound
from zbv_solver.construct.board import Attempt
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.rules import first_rule, in_flight_caps
from zbv_solver.improve.annealing import COOLER, LEVELS, anneal_in_rounds
from zbv_solver.improve.parameter_search import FINALISTS, at_few_microbatches, parameter_search
from zbv_solver.improve.rest_search import rest_search
from zbv_solver.plans.orders import Orders, first_in_first_out, in_entry_order
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import in_search_unit, make_plan
from zbv_solver.search.incumbent import (
    CHAINS,
    Cancelled,
    Chain,
    Halt,
    Incumbent,
    OnProgress,
    Solution,
    is_over,
    race,
    without_useless_splits,
)
from zbv_solver.search.options import SearchOptions, budgets_of
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

OVERTAKE_SHARE = 0.375
"""Placements of the search with overtaking, as a share of those of the search for injections."""
REST_SHARE = 0.5
"""Share of the tuning budget for the search of the rest of an order."""
TUNE_SHARE, TIGHT_TUNE_SHARE, INJECT_SHARE, ANNEAL_SHARE = 0.8, 0.4, 0.6, 0.8
"""Shares of the remaining time limit for these phases."""
ROUNDS = 12
"""Rounds of annealing of one start, at most."""
SEVERAL = 2
"""Times the most moves of annealing, if these are divided among several starts."""
LEAST_MOVES = 1_300
"""A start is given at least as many moves, or none."""
FIRST_ATTEMPTS = 8
"""Orders that are constructed for a problem of any size."""
FINISH_SECONDS = 1.3e-6
"""Seconds per action that timing, verifying and comparing the final plan take; reserved before a deadline."""
LEAST_SECONDS = 0.01
"""The shortest remaining time of a phase."""


class Search:
    """The search of an order for given stages.

    Attributes
    ----------
    problem, unit
        The problem in the unit of the search (:mod:`zbv_solver.search.assemble`), and that unit.
    budget
        How long every phase may run.
    starts
        The best orders of all chains of tuning, injecting and overtaking; annealing starts from these.
    annealed
        The orders that annealing of several starts ends with.
    bests
        The best order of every chain of every phase.
    is_tight
        Whether memory has space for few microbatches in flight.
    """

    def __init__(
        self,
        problem: Problem,
        options: SearchOptions,
        on_progress: OnProgress | None = None,
        cancelled: Cancelled | None = None,
    ):
        self.given, self.options = problem, options
        self.problem, self.unit = in_search_unit(problem)
        self.incumbent = Incumbent(problem, self.unit, on_progress)
        deadline = None
        if options.time_limit is not None:
            kept = min(0.5 * options.time_limit, FINISH_SECONDS * problem.max_actions)
            deadline = time.monotonic() + options.time_limit - kept
        self.halt = Halt(cancelled, deadline)
        self.budgets = budgets_of(options.effort, problem)
        self.budget = self.budgets[0]
        self.starts: list[Solution] = []
        self.annealed: list[Solution] = []
        self.bests: list[Solution] = []
        # Where microbatches differ, memory is tight while large ones are in flight.
        few = in_flight_caps(self.problem).min() < self.budget.ample * self.problem.pp_degree
        self.is_tight = bool(few) or not problem.is_equal

    def resume_from(self, orders: Orders) -> None:
        """Start from a known order; raises :class:`InvalidPlan` when it is not an order of the problem."""
        verify_orders(self.given, orders)
        is_in_entry_order = True
        if self.problem.is_equal:
            orders = first_in_first_out(orders, self.problem.n_stages)
        else:
            is_in_entry_order = in_entry_order(orders, self.problem.n_stages) == orders
        solution = Solution(objective_of(self.problem, orders), orders, "resumed")
        if is_in_entry_order:
            self.incumbent.accept(solution)
        else:
            self.incumbent.put_aside(solution)

    def run(self) -> None:
        """Run all phases, budget after budget, until the bound is met or the search is stopped."""
        with self.halt:
            self._run(("begin", self.begin), ("bound", self.bound))
            for budget in self.budgets:
                self.budget, self.starts, self.annealed = budget, [], []
                self._run(("construct", self.construct), ("tune", self.tune), ("inject", self.inject))
                before = self.incumbent.current
                self._run(
                    ("overtake", self.overtake),
                    ("anneal", self.anneal),
                    ("windows", self.windows),
                    ("exact", self.exact),
                )
                if budget is not self.budgets[-1] and self.incumbent.current is not None:
                    # The later phases may have left the one order of entry, which the first ones need.
                    self.incumbent.put_aside(self.incumbent.current)
                    self.incumbent.current = before

    def first_plan(self, enough: float) -> Plan:
        """A plan from constructed orders alone; it has a full bound if it is shorter than ``enough``."""
        with self.halt:
            self._run(("begin", self.begin), ("construct", self.construct))
            plan = self.plan()
            if plan.objective >= enough:
                return plan
            self._run(("bound", self.bound))
        return self.plan()

    def plan(self) -> Plan:
        """The verified plan of the best order, without baselines.

        Raises
        ------
        ContradictedBound
            When the plan undercuts the bound.
        """
        best = self.incumbent.best
        if best is None:
            raise RuntimeError("the search ended without an order; this is a bug in zbv, please report it.")
        extra: dict[str, object] = {"effort": self.options.effort}
        if self.options.without:
            extra["without"] = list(self.options.without)
        if self.halt.reason is not None:
            extra["cut"] = self.halt.reason
        return make_plan(
            self.given,
            without_useless_splits(self.given, best.orders),
            method=best.method,
            lower_bound=self.incumbent.bound * self.unit,
            source=self.incumbent.source,
            seed=self.options.seed,
            seconds=self.incumbent.seconds,
            extra=extra,
        )

    def _run(self, *phases: tuple[str, Callable[[], None]]) -> None:
        """Run phases that the options do not leave out, until the search is over."""
        for name, phase in phases:
            if name not in self.options.without and not is_over(self.incumbent, self.halt):
                phase()

    def _race(self, chain: Chain, share: float) -> list[Solution]:
        """Race the chains of a phase in a share of the remaining time; returns the best order of each."""
        left = self._seconds_left()
        seconds = None if left is None else share * left
        bests = race(chain, self.incumbent, self.halt, workers=self.options.workers, seconds=seconds)
        self.bests += bests
        return bests

    def _seconds_left(self) -> float | None:
        limit = self.options.time_limit
        return None if limit is None else max(LEAST_SECONDS, limit - self.incumbent.seconds)

    def begin(self) -> None:
        """Find a first order as quickly as possible."""
        self.incumbent.bound = lower_bound(self.problem, effort="quick").value
        first = ListScheduler(self.problem).attempt(first_rule(self.problem), "list(first)")
        solution = _solution(first or serial(self.problem))
        if self.incumbent.is_improved_by(solution.value):
            self.incumbent.accept(solution)

    def bound(self) -> None:
        """Compute the full lower bound."""
        effort: BoundEffort = "full" if self.options.effort == "quick" else "thorough"
        current = self.incumbent.current
        enough = math.inf if current is None else current.value
        bound = lower_bound(self.problem, effort, enough, lambda: bool(self.halt.flag[0]))
        self.incumbent.raise_bound(bound.value, "bounds")

    def construct(self) -> None:
        """Construct greedy and list-scheduled orders alternately."""
        attempts = priority_schedules(self.problem)
        # Where microbatches differ, the structured greedy does worse than lists.
        if self.problem.placement.kind == "v" and self.problem.is_equal:
            attempts = _alternately(get_v_schedule(self.problem), attempts)
        most = max(FIRST_ATTEMPTS, self.budget.constructed // self.problem.max_actions)
        for attempt in itertools.islice(attempts, most):
            if self.incumbent.is_improved_by(attempt.value):
                self.incumbent.accept(_solution(attempt))
            if is_over(self.incumbent, self.halt):
                return

    def tune(self) -> None:
        """Search the parameters of constructors, then the rest of the best order."""
        most = self.budget.most_tuned * at_few_microbatches(self.problem).max_actions
        most += CHAINS * 2 * FINALISTS * self.problem.max_actions if self.budget.most_tuned else 0
        placements = min(self.budget.tuned, most) // CHAINS
        share = TIGHT_TUNE_SHARE if self.is_tight else TUNE_SHARE
        self.starts += self._race(partial(self._tuned, placements), share)

    def _tuned(self, placements: int, number: int, halt: Halt) -> Iterator[Solution | None]:
        best, rule = self.incumbent.current, None
        seed, rest = self.options.seed * CHAINS + number, int(REST_SHARE * placements)
        spent = partial(halt.spent, 1 - REST_SHARE)
        for attempt in parameter_search(self.problem, placements - rest, seed, halt.flag, spent):
            solution = None if attempt is None else _solution(attempt)
            if attempt is not None and (best is None or attempt.value < best.value):
                best, rule = solution, attempt.rule
            yield solution
        if best is not None:
            for attempt in rest_search(self.problem, best.orders, rest, seed, halt.flag, rule):
                yield None if attempt is None else _solution(attempt)

    def inject(self) -> None:
        """Search the times at which microbatches enter, where memory is tight."""
        if not self.is_tight or self._has_large_ones():
            return
        most = self.budget.most_injected * self.problem.max_actions
        placements = min(self.budget.injected, most) // CHAINS
        injected: list[list[Solution]] = [[] for _ in range(CHAINS)]
        self._race(partial(self._injected, placements, injected), INJECT_SHARE)
        self.starts += itertools.chain(*injected)

    def _injected(
        self, placements: int, injected: list[list[Solution]], number: int, halt: Halt
    ) -> Iterator[Solution | None]:
        """Also lists all orders of every chain in ``injected``."""
        from zbv_solver.improve.injection_search import injection_search  # few searches need it

        seed = self.options.seed * CHAINS + number
        for attempt in injection_search(self.problem, placements, seed, halt.flag):
            if attempt is None:
                yield None
            else:
                injected[number].append(_solution(attempt))
                yield injected[number][-1]

    def overtake(self) -> None:
        """Let small microbatches overtake large ones, where the path of these decides."""
        if self._has_large_ones():
            placements = int(OVERTAKE_SHARE * self.budget.injected) // CHAINS
            self.starts += self._race(partial(self._overtaken, placements), INJECT_SHARE)

    def _overtaken(self, placements: int, number: int, halt: Halt) -> Iterator[Solution | None]:
        from zbv_solver.improve.overtaking_search import overtaking_search

        seed = self.options.seed * CHAINS + number
        for result in overtaking_search(self.problem, placements, seed, halt.flag):
            yield None if result is None else Solution(*result, "overtaking")

    def _has_large_ones(self) -> bool:
        """Whether the path of a large microbatch decides."""
        if self.problem.is_equal:
            return False
        from zbv_solver.improve.overtaking_search import large_ones

        return len(large_ones(self.problem)) > 0

    def anneal(self) -> None:
        """Move single actions: of the best order, or, where memory is tight, of all starts."""
        best, most = self.incumbent.best, self.budget.annealed // self.problem.max_actions
        if best is None:
            return
        starts = list({start.value: start for start in (*self.starts, best)}.values())
        moves = min(SEVERAL * self.budget.most_annealed, most)
        if self.is_tight and len(starts) > 1 and moves * LEVELS[0].share >= CHAINS * LEAST_MOVES:
            self.annealed = self._anneal_several(starts, moves)
            return
        moves = min(self.budget.most_annealed, most) // (CHAINS * ROUNDS)
        if moves > 0:
            self._race(partial(self._anneal_one, best, moves), ANNEAL_SHARE)

    def _anneal_one(self, start: Solution, moves: int, number: int, halt: Halt) -> Iterator[Solution]:
        """Anneal one order in both chains, each with other temperatures."""
        seed = (self.options.seed * CHAINS + number) * ROUNDS
        return self._rounds(start, ROUNDS, moves, COOLER if number else 1.0, seed, halt)

    def _anneal_several(self, starts: list[Solution], moves: int) -> list[Solution]:
        """Anneal all starts a little, and the best of them more; returns the orders of the last level."""
        done = 0.0
        for number, level in enumerate(LEVELS):
            if is_over(self.incumbent, self.halt):
                return []
            starts.sort(key=lambda start: start.value)
            kept = min(level.kept, int(moves * level.share) // LEAST_MOVES)
            starts = starts[:kept]
            share = ANNEAL_SHARE * level.share / (1 - ANNEAL_SHARE * done)
            self._race(partial(self._anneal_level, starts, moves, number), share)
            done += level.share
        return starts

    def _anneal_level(
        self, starts: list[Solution], moves: int, level_number: int, number: int, halt: Halt
    ) -> Iterator[Solution]:
        """Anneal each start as one level says, and replace it by the result; the chains take turns."""
        level = LEVELS[level_number]
        moves = int(moves * level.share) // (len(starts) * level.rounds)
        for place in range(number, len(starts), CHAINS):
            factor = level.factors[place % len(level.factors)]
            seed = ((self.options.seed * len(LEVELS) + level_number) * LEVELS[0].kept + place) * ROUNDS
            for solution in self._rounds(starts[place], level.rounds, moves, factor, seed, halt):
                starts[place] = solution
                yield solution

    def _rounds(
        self, start: Solution, rounds: int, moves: int, factor: float, seed: int, halt: Halt
    ) -> Iterator[Solution]:
        """The start, or a better order, after each round of annealing."""
        best = start
        for value, orders in anneal_in_rounds(
            self.problem,
            start.orders,
            start.value,
            rounds=rounds,
            moves=moves,
            factor=factor,
            seed=seed,
            halt=halt.flag,
        ):
            if value < best.value:
                best = Solution(value, orders, "annealing")
            yield best

    def windows(self) -> None:
        """Improve one window of time after another by CP-SAT, if the problem is small enough."""
        current = self.incumbent.current
        if self.problem.max_actions > self.budget.window_actions or current is None:
            return
        starts = self.annealed or [current]
        if not self.problem.is_equal:
            # In any order of the microbatches, windows take longer, and other starts hardly gain.
            starts = [start for start in (current, self.incumbent.reserve) if start is not None]
        self._race(partial(self._windowed, starts), 1.0)

    def _windowed(self, starts: list[Solution], number: int, halt: Halt) -> Iterator[Solution]:
        # Imported here because OR-Tools takes a second to import and many searches do not need it.
        from zbv_solver.improve.cp_search import sweep_windows

        # The last chain takes the first start: a single worker gives it all the time that others leave.
        for start in starts[CHAINS - 1 - number :: CHAINS]:
            orders = sweep_windows(
                self.problem,
                start.orders,
                effort=self.budget.window_time,
                seed=self.options.seed,
                time_limit=self._seconds_left(),
                cancelled=halt.check,
            )
            if orders is not None:
                yield Solution(objective_of(self.problem, orders), orders, "cp-sat windows")

    def exact(self) -> None:
        """Solve the whole problem by CP-SAT, if it is small enough."""
        best = self.incumbent.best
        if self.problem.max_actions > self.budget.exact_actions or best is None:
            return
        from zbv_solver.improve.cp_search import Listener, refine  # late, as above

        refine(
            self.problem,
            best.orders,
            lower_bound=self.incumbent.bound,
            effort=self.budget.exact_time,
            time_limit=self._seconds_left(),
            seed=self.options.seed,
            cancelled=self.halt.check,
            listener=Listener(
                on_solution=lambda orders, value: self.incumbent.accept(Solution(value, orders, "cp-sat")),
                on_bound=lambda bound: self.incumbent.raise_bound(bound, "cp-sat"),
            ),
        )


def _solution(attempt: Attempt) -> Solution:
    return Solution(attempt.value, attempt.orders, attempt.method)


def _alternately(*attempts: Iterator[Attempt]) -> Iterator[Attempt]:
    """Alternate between the iterators until all are exhausted."""
    waiting = list(attempts)
    while waiting:
        for iterator in list(waiting):
            attempt = next(iterator, None)
            if attempt is None:
                waiting.remove(iterator)
            else:
                yield attempt
