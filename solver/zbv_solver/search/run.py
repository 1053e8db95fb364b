"""The search: from a problem to a verified plan, by one phase after the other.

The phases are: construct, tune, inject, overtake, anneal, windows, exact, and for problems with pairs, second
and last, pairs. Budgets are counted in placed actions, moves and CP-SAT's deterministic time, never in
seconds. So the same problem, options and version give the same plan on every machine, unless a time limit or
a cancellation ends the search early; the plan's provenance records that.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from zbv_solver.bounds import BoundEffort, lower_bound
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.rules import first_rule, in_flight_caps
from zbv_solver.improve.annealing import COOLER, LEVELS, anneal_in_rounds, is_overtaking
from zbv_solver.improve.parameter_search import FINALISTS, at_few_microbatches, parameter_search, rest_search
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem, require_same_problem
from zbv_solver.search.assemble import compare, in_search_unit, make_plan
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
from zbv_solver.search.options import (
    ANNEAL_SHARE,
    FINISH_SECONDS,
    FIRST_ATTEMPTS,
    INJECT_SHARE,
    LEAST_MOVES,
    LEAST_SECONDS,
    OVERTAKE_SHARE,
    REST_SHARE,
    ROUNDS,
    SEVERAL,
    TIGHT_TUNE_SHARE,
    TUNE_SHARE,
    SearchOptions,
    budgets_of,
)
from zbv_solver.search.pairs import PairSearch
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders


class Search:
    """The search of an order for given stages."""

    def __init__(
        self,
        problem: Problem,
        options: SearchOptions,
        on_progress: OnProgress | None = None,
        cancelled: Cancelled | None = None,
    ):
        self.given, self.options = problem, options
        self.with_pairs, self.unit = in_search_unit(problem)  # in the unit of the search, and that unit
        self.problem = self.with_pairs.without_pairs()  # the phases order single actions
        self.incumbent = Incumbent(problem, self.unit, on_progress)
        deadline = None
        if options.time_limit is not None:
            kept = min(0.5 * options.time_limit, FINISH_SECONDS * problem.max_actions)
            deadline = time.monotonic() + options.time_limit - kept
        self.halt = Halt(cancelled, deadline)
        self.paired: PairSearch | None = None
        if self.with_pairs.communication is not None:
            self.paired = PairSearch(self.with_pairs, options, self.incumbent, self.halt)
        self.budgets = budgets_of(options.effort, problem)
        self.budget = self.budgets[0]
        self.starts: list[Solution] = []  # the best orders of all chains before annealing
        self.annealed: list[Solution] = []  # what annealing of several starts ends with
        # Where microbatches differ, memory is tight while large ones are in flight.
        few = in_flight_caps(self.problem).min() < self.budget.ample * self.problem.pp_degree
        self.is_tight = bool(few) or not problem.is_equal

    def resume_from(self, orders: Orders) -> None:
        """Start from a known order; raises :class:`InvalidPlan` when it is not an order of the problem."""
        verify_orders(self.given, orders)
        if self.paired is not None:
            self.paired.resume_from(orders)
            orders = orders.without_pairs()
        if self.problem.is_equal:
            orders = first_in_first_out(orders, self.problem.n_stages)
        solution = Solution(objective_of(self.problem, orders), orders, "resumed")
        if is_overtaking(self.problem, orders):
            self.incumbent.put_aside(solution)
        else:
            self.incumbent.accept(solution)

    def run(self) -> None:
        """Run all phases, budget after budget, until the bound is met or the search is stopped."""
        with self.halt:
            self._run("begin", "bound")
            for budget in self.budgets:
                self.budget, self.starts, self.annealed = budget, [], []
                self._run("construct", "pairs", "tune", "inject")
                before = self.incumbent.current
                self._run("overtake", "anneal", "windows", "exact", "pairs")
                if budget is not self.budgets[-1] and self.incumbent.current is not None:
                    # The later phases may have left the one order of entry, which the first ones need.
                    self.incumbent.put_aside(self.incumbent.current)
                    self.incumbent.current = before
            if self.paired is not None:
                self.paired.solve(self.budget)
                if self.options.effort != "quick" and self.paired.is_open:
                    self.bound()

    def first_plan(self, enough: float) -> Plan:
        """A plan from constructed orders alone; it has a full bound if it is shorter than ``enough``."""
        with self.halt:
            self._run("begin", "construct")
            plan = self.plan()
            if plan.objective >= enough:
                return plan
            self._run("bound")
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
        if self.paired is not None:
            best = self.paired.choose(best)
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

    def _run(self, *phases: str) -> None:
        """Call the methods of these names, but those that the options leave out, until the search is over."""
        for phase in phases:
            if phase not in self.options.without and not self._is_over():
                getattr(self, phase)()

    def _is_over(self) -> bool:
        """Whether the search is over; with pairs also, whether no order without pairs can be shorter."""
        if self.paired is not None and self.paired.is_settled:
            return True
        return is_over(self.incumbent, self.halt)

    def _race(self, chain: Chain, share: float) -> list[Solution]:
        """Race the chains of a phase in a share of the remaining time; returns the best order of each."""
        limit = self.options.time_limit
        seconds = None if limit is None else share * max(LEAST_SECONDS, limit - self.incumbent.seconds)
        return race(chain, self.incumbent, self.halt, workers=self.options.workers, seconds=seconds)

    def begin(self) -> None:
        """Find a first order as quickly as possible."""
        self.incumbent.bound = lower_bound(self.with_pairs, effort="quick").value
        first = ListScheduler(self.problem).attempt(first_rule(self.problem), "list(first)")
        solution = Solution.of(first or serial(self.problem))
        if self.incumbent.is_improved_by(solution.value):
            self.incumbent.accept(solution)

    def bound(self) -> None:
        """Compute the full lower bound."""
        # With pairs, what is thorough takes as long as a phase, and is cheaper with a good order.
        paired = None if self.paired is None else self.paired.best
        is_later = self.paired is not None and paired is None
        effort: BoundEffort = "full" if is_later or self.options.effort == "quick" else "thorough"
        current = paired or self.incumbent.current
        enough = math.inf if current is None else current.value
        bound = lower_bound(self.with_pairs, effort, enough, lambda: bool(self.halt.flag[0]))
        self.incumbent.raise_bound(bound.value, "bounds")

    def construct(self) -> None:
        """Construct greedy and list-scheduled orders alternately."""
        attempts = priority_schedules(self.problem)
        # Where microbatches differ, the structured greedy does worse than lists.
        if self.problem.placement.kind == "v" and self.problem.is_equal:
            pairs = itertools.zip_longest(get_v_schedule(self.problem), attempts)
            attempts = (attempt for pair in pairs for attempt in pair if attempt is not None)
        most = max(FIRST_ATTEMPTS, self.budget.constructed // self.problem.max_actions)
        for attempt in itertools.islice(attempts, most):
            if self.incumbent.is_improved_by(attempt.value):
                self.incumbent.accept(Solution.of(attempt))
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
            solution = None if attempt is None else Solution.of(attempt)
            if attempt is not None and (best is None or attempt.value < best.value):
                best, rule = solution, attempt.rule
            yield solution
        if best is not None:
            for attempt in rest_search(self.problem, best.orders, rest, seed, halt.flag, rule):
                yield None if attempt is None else Solution.of(attempt)

    def inject(self) -> None:
        """Search the times at which microbatches enter, where memory is tight."""
        if not self.is_tight or self._has_large_ones():
            return
        from zbv_solver.improve.injection_search import injection_search  # few searches need it

        most = self.budget.most_injected * self.problem.max_actions
        placements = min(self.budget.injected, most) // CHAINS
        injected: list[list[Solution]] = [[] for _ in range(CHAINS)]  # all orders of every chain

        def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
            seed = self.options.seed * CHAINS + number
            for attempt in injection_search(self.problem, placements, seed, halt.flag):
                if attempt is not None:
                    injected[number].append(Solution.of(attempt))
                yield None if attempt is None else injected[number][-1]

        self._race(chain, INJECT_SHARE)
        self.starts += itertools.chain(*injected)

    def overtake(self) -> None:
        """Let small microbatches overtake large ones, where the path of these decides."""
        if not self._has_large_ones():
            return
        from zbv_solver.improve.overtaking_search import overtaking_search

        placements = int(OVERTAKE_SHARE * self.budget.injected) // CHAINS

        def chain(number: int, halt: Halt) -> Iterator[Solution | None]:
            seed = self.options.seed * CHAINS + number
            for result in overtaking_search(self.problem, placements, seed, halt.flag):
                yield None if result is None else Solution(*result, "overtaking")

        self.starts += self._race(chain, INJECT_SHARE)

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
            seeds = self.options.seed * CHAINS
            self._race(
                lambda number, halt: self._rounds(
                    best, ROUNDS, moves, COOLER if number else 1.0, (seeds + number) * ROUNDS, halt
                ),
                ANNEAL_SHARE,
            )

    def _anneal_several(self, starts: list[Solution], moves: int) -> list[Solution]:
        """Anneal all starts a little, and the best of them more; returns the orders of the last level."""
        done = 0.0
        for number, level in enumerate(LEVELS):
            if is_over(self.incumbent, self.halt):
                return []
            starts = sorted(starts, key=lambda start: start.value)
            starts = starts[: min(level.kept, int(moves * level.share) // LEAST_MOVES)]
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
        made = anneal_in_rounds(
            self.problem,
            start.orders,
            start.value,
            rounds=rounds,
            moves=moves,
            factor=factor,
            seed=seed,
            halt=halt.flag,
        )
        for value, orders in made:
            yield start if value == start.value else Solution(value, orders, "annealing")

    def windows(self) -> None:
        """Improve one window of time after another by CP-SAT, if the problem is small enough."""
        current = self.incumbent.current
        if self.problem.max_actions > self.budget.window_actions or current is None:
            return
        starts = self.annealed or [current]
        if not self.problem.is_equal:
            # In any order of the microbatches, windows take longer, and other starts hardly gain.
            starts = [start for start in (current, self.incumbent.reserve) if start is not None]
        # Imported here because OR-Tools takes a second to import and many searches do not need it.
        from zbv_solver.improve.cp_search import sweep_windows

        def chain(number: int, halt: Halt) -> Iterator[Solution]:
            # The last chain takes the first start: a single worker gives it all the time that others leave.
            for start in starts[CHAINS - 1 - number :: CHAINS]:
                orders = sweep_windows(
                    self.problem,
                    start.orders,
                    effort=self.budget.window_time,
                    seed=self.options.seed,
                    cancelled=halt.check,
                )
                if orders is not None:
                    yield Solution(objective_of(self.problem, orders), orders, "cp-sat windows")

        self._race(chain, 1.0)

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
            seed=self.options.seed,
            cancelled=self.halt.check,
            listener=Listener(
                on_solution=lambda orders, value: self.incumbent.accept(Solution(value, orders, "cp-sat")),
                on_bound=self._prove_exactly,
            ),
        )

    def pairs(self) -> None:
        """Let pairs form and part."""
        if self.paired is not None:
            self.paired.anneal(self.budget, self._race)

    def _prove_exactly(self, bound: float) -> None:
        """Take a bound of CP-SAT, which knows single actions only."""
        if self.paired is None:
            self.incumbent.raise_bound(bound, "cp-sat")


def search(
    problem: AnyProblem,
    options: SearchOptions | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Cancelled | None = None,
    incumbent: Orders | Plan | None = None,
) -> Plan:
    """Find a plan, prove a bound, verify.

    Parameters
    ----------
    problem
        For layers, cut, placement and order are chosen together (:mod:`zbv_solver.search.layered`).
    on_progress
        Called at every better plan or bound, one call at a time.
    cancelled
        Polled from another thread twenty times a second; once true, the best plan so far is returned.
    incumbent
        An order to start from, such as that of an earlier search; for layers a plan, because orders alone do
        not define the cut.

    Raises
    ------
    InfeasibleMemory
        When no plan fits the memory limit.
    InvalidPlan
        When ``incumbent`` is not an order of this problem, or is a plan of another problem.
    ContradictedBound
        When the plan undercuts the lower bound: one of the two is wrong, and neither is returned.
    """
    options = options or SearchOptions()
    if isinstance(problem, LayeredProblem):
        # Loading the kernels for layers takes a moment.
        from zbv_solver.search.layered import plan_layers

        return plan_layers(problem, options, on_progress, cancelled, incumbent)
    problem.require_feasible()
    if isinstance(incumbent, Plan):
        require_same_problem(problem, incumbent.problem)
        incumbent = incumbent.orders
    if problem.copies is not None and problem.memory.limit is not None:
        from zbv_solver.search.offload import search_with_copies  # few problems need it

        return search_with_copies(problem, options, on_progress, cancelled, incumbent)
    running = Search(problem, options, on_progress, cancelled)
    if incumbent is not None:
        running.resume_from(incumbent)
    running.run()
    return replace(running.plan(), baselines=compare(problem))
