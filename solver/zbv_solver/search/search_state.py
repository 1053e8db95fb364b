"""The state of one search: its incumbent, its lower bound, its progress reports, and the race of its chains.

A stage of a search runs as two chains with different seeds, on two threads if the caller allows. At the end
of the stage their results are combined in the order of the chains, so threads change the time but not the
plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Self

from zbv_solver.improve.useless_splits import without_useless_splits
from zbv_solver.plans.certificate import certify, verdict
from zbv_solver.plans.orders import Orders, first_in_first_out, in_entry_order
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.halt import Halt, Turn
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search_unit import in_search_unit
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

CHAINS = 2
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


class SearchState:
    """Incumbent, lower bound, time and progress reports of one search. A context manager.

    Attributes
    ----------
    given
        The caller's problem, with which orders are verified and the final plan is timed.
    problem, unit
        The same problem in the unit of the search (:mod:`zbv_solver.search.search_unit`), and that unit. All
        times here are in this unit.
    bound, source
        The best proven bound, and where it comes from.
    found
        The incumbent.
    bests
        The best order of every chain of every stage.
    aside
        An order whose stages do not all run the microbatches in one order. Only CP-SAT can improve it.
    heard
        The best objective that was reported.
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
        self.bests: list[Found] = []
        self.aside: Found | None = None
        self.heard = float("inf")

    def __enter__(self) -> Self:
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
        if self.problem.is_equal:
            orders = first_in_first_out(incumbent, self.problem.n_stages)
        elif in_entry_order(incumbent, self.problem.n_stages) == incumbent:
            orders = incumbent
        else:
            self._set_aside(Found(objective_of(self.problem, incumbent), incumbent, "resumed"))
            return
        self._take(Found(objective_of(self.problem, orders), orders, "resumed"))

    def finish(self) -> Plan:
        """The verified plan of the incumbent, without baselines.

        Raises
        ------
        ContradictedBound
            When the plan undercuts the bound.
        """
        best = self.best()
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
            lower_bound=self.bound * self.unit,
            source=self.source,
            seed=self.options.seed,
            seconds=time.monotonic() - self.began,
            extra=extra,
        )

    def best(self) -> Found | None:
        """The best order so far, whether or not every stage of the search can improve it."""
        if self.aside is None or (self.found is not None and self.found.value <= self.aside.value):
            return self.found
        return self.aside

    def _set_aside(self, found: Found) -> None:
        """Keep an order that not every stage of the search can represent."""
        if self.aside is None or found.value < self.aside.value:
            self.aside = found

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
                if (best := self.best()) is not None:
                    self._report(best)

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
        best = self.best()
        return best is not None and (self._meets_bound(best) or self.halt.check())

    def _meets_bound(self, found: Found) -> bool:
        return found.value <= self.bound * (1 + OPTIMAL_GAP)
