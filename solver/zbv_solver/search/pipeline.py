"""The stages of a search: construct, tune, anneal, improve by CP-SAT, prove.

Tuning and annealing run as two chains with different seeds, on two threads if the caller allows. At the end
of a stage the results are combined in the order of the chains, so threads change the time but not the plan.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from types import TracebackType

from zbv_solver.bounds import BoundEffort, lower_bound
from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.list_scheduling import (
    ListScheduler,
    in_flight_caps,
    priority_schedules,
    serial,
    simple_rule,
)
from zbv_solver.improve.annealing_rounds import COOLER, LEVELS, anneal_in_rounds
from zbv_solver.improve.injection_search import injection_search
from zbv_solver.improve.parameter_search import FINALISTS, at_few_microbatches, parameter_search
from zbv_solver.improve.rest_search import rest_search
from zbv_solver.improve.useless_splits import without_useless_splits
from zbv_solver.plans.certificate import certify, verdict
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import compare, make_plan
from zbv_solver.search.halt import Halt, Turn
from zbv_solver.search.options import BUDGETS, SearchOptions
from zbv_solver.search.search_unit import in_search_unit
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

CHAINS = 2
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
FINISH_SECONDS = 1.3e-6
"""Seconds per action that timing, verifying and comparing the final plan take; reserved before a deadline."""


@dataclass(frozen=True, eq=False)
class Progress:
    """A better plan or a better bound, as reported while searching.

    ``orders`` are verified orders of ``problem``, which may change from report to report where layers are
    cut. The final ``objective`` may be a little lower, because the span is then computed exactly instead of
    from earliest starts.
    """

    objective: float
    lower_bound: float
    gap: float
    method: str
    seconds: float
    orders: Orders
    problem: Problem


OnProgress = Callable[[Progress], None]
Cancelled = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Found:
    """An order and its objective, in the unit of the search."""

    value: float
    orders: Orders
    method: str


class Pipeline:
    """State of one search: incumbent, lower bound, budget and progress reports. A context manager.

    Attributes
    ----------
    given
        The caller's problem, with which orders are verified and the final plan is timed.
    problem, unit
        The same problem in the unit of the search (:mod:`zbv_solver.search.search_unit`), and that unit. All
        times here are in this unit.
    bound, source
        The best proven bound, and where it comes from.
    starts
        The best orders of all runs of tuning and of the search for injections; annealing starts from these.
    finalists
        The orders that several starts of annealing end with, if it had several.
    bests
        The best order of every chain of every stage.
    heard
        The best objective that was reported.
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
        self.given, self.options = problem, options
        self.problem, self.unit = in_search_unit(problem)
        self.budget = BUDGETS[options.effort].of(problem.max_actions)
        self.on_progress = on_progress
        self.began = time.monotonic()
        deadline = None
        if options.time_limit is not None:
            kept = min(0.5 * options.time_limit, FINISH_SECONDS * problem.max_actions)
            deadline = self.began + options.time_limit - kept
        self.halt = Halt(cancelled, deadline)
        self.pool = ThreadPoolExecutor(min(options.workers, CHAINS))
        self.lock = Lock()
        self.bound, self.source = 0.0, "bounds"
        self.found: Found | None = None
        self.starts: list[Found] = []
        self.finalists: list[Found] = []
        self.bests: list[Found] = []
        self.heard = float("inf")
        self.is_tight = bool(in_flight_caps(self.problem).min() < self.budget.ample * self.problem.pp_degree)

    def __enter__(self) -> Pipeline:
        self.halt.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.halt.flag[0] = 1  # stops chains that still run
        self.pool.shutdown()
        self.halt.__exit__(kind, error, trace)

    def resume_from(self, incumbent: Orders) -> None:
        """Start from a known order; raises :class:`InvalidPlan` when it is not an order of the problem."""
        verify_orders(self.given, incumbent)
        orders = first_in_first_out(incumbent, self.problem.n_stages)
        self._take(Found(objective_of(self.problem, orders), orders, "resumed"))

    def run(self) -> None:
        """Run all stages until the bound is met or the search is stopped."""
        stages: tuple[tuple[str | None, Callable[[], None]], ...] = (
            (None, self._begin),
            (None, self._bound),
            (None, self._construct),
            ("tune", self._tune),
            ("inject", self._inject),
            ("anneal", self._anneal),
            ("windows", self._windows),
            ("exact", self._refine),
        )
        for name, stage in stages:
            if name not in self.options.without and not self._is_over():
                stage()

    def finish(self) -> Plan:
        """The verified plan of the incumbent, with baselines.

        Raises
        ------
        ContradictedBound
            When the plan undercuts the bound.
        """
        if self.found is None:
            raise RuntimeError("the search ended without an order; this is a bug in zbv, please report it.")
        extra: dict[str, object] = {"effort": self.options.effort}
        if self.options.without:
            extra["without"] = list(self.options.without)
        if self.halt.reason is not None:
            extra["cut"] = self.halt.reason
        plan = make_plan(
            self.given,
            without_useless_splits(self.given, self.found.orders),
            method=self.found.method,
            lower_bound=self.bound * self.unit,
            source=self.source,
            seed=self.options.seed,
            seconds=time.monotonic() - self.began,
            extra=extra,
        )
        return replace(plan, baselines=compare(self.given))

    def _begin(self) -> None:
        """Find a first order as quickly as possible."""
        self.bound = lower_bound(self.problem, effort="quick").value
        rule = simple_rule(self.problem, "backward-deep", 1.0, 0.5)
        attempt = ListScheduler(self.problem).attempt(rule, "list(first)") or serial(self.problem)
        if self._is_better(attempt.value):
            self._take(_of(attempt))

    def _bound(self) -> None:
        """Compute the full lower bound."""
        effort: BoundEffort = "full" if self.options.effort == "quick" else "thorough"
        enough = math.inf if self.found is None else self.found.value
        self._raise_bound(lower_bound(self.problem, effort, enough).value, "bounds")

    def _construct(self) -> None:
        """Construct greedy and list-scheduled orders alternately."""
        listed = priority_schedules(self.problem)
        attempts = listed
        if self.problem.placement.kind == "v":
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
        if not self.is_tight:
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

    def _anneal(self) -> None:
        """Move single actions: of the best order, or, where memory is tight, of all starts."""
        best, most = self.found, self.budget.annealed // self.problem.max_actions
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
        from zbv_solver.improve.windows import sweep_windows

        starts = self.finalists or [self.found]

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
        if self.problem.max_actions > self.budget.exact_actions or self.found is None:
            return
        from zbv_solver.improve.exact import Listener, refine  # late, as above

        refine(
            self.problem,
            self.found.orders,
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

    def _seconds_left(self) -> float | None:
        if self.options.time_limit is None:
            return None
        return max(0.01, self.options.time_limit - (time.monotonic() - self.began))

    def _race(self, chain_of: Callable[[int, Turn], Iterator[Found | None]], share: float) -> list[Found]:
        """Run the chains; the best of their orders becomes the incumbent if it is better.

        Returns the best order of each chain, in the order of the chains.

        When a chain meets the bound, every other chain ends once it has made as many steps, so that the plan
        does not depend on which chain was faster. A stage takes at most ``share`` of the remaining time. A
        single worker runs the chains one after another, and they divide that time evenly.
        """
        left = self._seconds_left()
        until = None if left is None else time.monotonic() + share * left
        met: dict[int, int] = {}  # steps after which a chain met the bound

        def run(number: int) -> Found | None:
            best = None
            with self._turn(until, 1 if self.options.workers > 1 else CHAINS - number) as turn:
                for step, found in enumerate(chain_of(number, turn)):
                    if found is not None and (best is None or found.value < best.value):
                        best = found
                        self._hear(found)
                        if self._meets_bound(found):
                            met[number] = step
                    is_last = any(step >= other for other in met.copy().values())
                    if is_last or self._is_over() or turn.spent() >= 1:
                        break
            return best

        bests = list(self.pool.map(run, range(CHAINS)))
        self.bests += [best for best in bests if best is not None]
        for number in sorted(range(CHAINS), key=lambda number: (met.get(number, float("inf")), number)):
            best = bests[number]
            if best is not None and self._is_better(best.value):
                self._take(best)
        return [best for best in bests if best is not None]

    @contextmanager
    def _turn(self, until: float | None, waiting: int) -> Iterator[Turn]:
        """The turn of a chain: an even share of the time until then if other chains wait for their turn."""
        began = time.monotonic()
        if until is None:
            yield Turn(self.halt.flag, began, None)
        elif waiting == 1:
            yield Turn(self.halt.flag, began, until - began)
        else:
            seconds = (until - began) / waiting
            with Halt(self.halt.check, began + seconds) as halt:
                yield Turn(halt.flag, began, seconds)

    def _hear(self, found: Found) -> None:
        """Report the order of a chain before the stage has ended."""
        with self.lock:
            if found.value < self.heard * (1 - OPTIMAL_GAP):
                verify_orders(self.given, found.orders)
                self.heard = found.value
                self._report(found)

    def _take(self, found: Found) -> None:
        """Make an order the incumbent."""
        verify_orders(self.given, found.orders)
        with self.lock:
            self.found = found
            if found.value < self.heard * (1 - OPTIMAL_GAP):
                self.heard = found.value
                self._report(found)

    def _raise_bound(self, bound: float, source: str) -> None:
        with self.lock:
            if bound > self.bound * (1 + OPTIMAL_GAP):
                self.bound, self.source = bound, source
                if self.found is not None:
                    self._report(self.found)

    def _report(self, found: Found) -> None:
        # A contradicted bound ends the search, and finish() raises; it is not reported as progress.
        if self.on_progress is None or verdict(found.value, self.bound) == "contradicted":
            return
        certificate = certify(self.problem, found.value, self.bound, self.source)
        self.on_progress(
            Progress(
                objective=found.value * self.unit,
                lower_bound=certificate.lower_bound * self.unit,
                gap=certificate.gap,
                method=found.method,
                seconds=time.monotonic() - self.began,
                orders=without_useless_splits(self.given, found.orders),
                problem=self.given,
            )
        )

    def _is_better(self, value: float) -> bool:
        return self.found is None or value < self.found.value * (1 - OPTIMAL_GAP)

    def _is_over(self) -> bool:
        return self.found is not None and (self._meets_bound(self.found) or self.halt.check())

    def _meets_bound(self, found: Found) -> bool:
        return found.value <= self.bound * (1 + OPTIMAL_GAP)


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
