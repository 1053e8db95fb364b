"""The best orders and the best bound that a search has found, and its reports of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import certify, verdict
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import without_useless_splits
from zbv_solver.verify.verifier import verify_orders


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
class Solution:
    """An order and its objective, in the unit of the search."""

    value: float
    orders: Orders
    method: str


class Incumbent:
    """The best orders and the best bound so far. Chains may report to it from several threads.

    Attributes
    ----------
    problem, unit
        The caller's problem, and the unit of the search in the caller's. All values here are in this unit.
    bound, source
        The best proven bound, and where it comes from.
    current
        The order that the phases of the search improve.
    reserve
        A better order that most phases cannot start from, because its stages run the microbatches in
        different orders. Annealing and CP-SAT can.
    """

    def __init__(self, problem: Problem, unit: float, on_progress: OnProgress | None):
        self.problem, self.unit, self.on_progress = problem, unit, on_progress
        self.bound, self.source = 0.0, "bounds"
        self.current: Solution | None = None
        self.reserve: Solution | None = None
        self._began, self._reported = time.monotonic(), math.inf
        self._lock = Lock()

    @property
    def seconds(self) -> float:
        """Time since the search began."""
        return time.monotonic() - self._began

    @property
    def best(self) -> Solution | None:
        """The best order, whether or not every phase can start from it."""
        if self.reserve is None or (self.current is not None and self.current.value <= self.reserve.value):
            return self.current
        return self.reserve

    @property
    def is_optimal(self) -> bool:
        """Whether the best order meets the bound."""
        return self.best is not None and self.meets_bound(self.best)

    def meets_bound(self, solution: Solution) -> bool:
        """Whether an order is optimal, as far as is proved."""
        return solution.value <= self.bound * (1 + OPTIMAL_GAP)

    def is_improved_by(self, value: float) -> bool:
        """Whether a value is better than that of the current order."""
        return self.current is None or value < self.current.value * (1 - OPTIMAL_GAP)

    def accept(self, solution: Solution) -> None:
        """Make an order the current one."""
        with self._lock:
            self.current = solution
            self._report_better(solution)

    def announce(self, solution: Solution) -> None:
        """Report an order of a chain before its race has ended."""
        with self._lock:
            self._report_better(solution)

    def put_aside(self, solution: Solution) -> None:
        """Keep an order in reserve."""
        if self.reserve is None or solution.value < self.reserve.value:
            self.reserve = solution

    def raise_bound(self, bound: float, source: str) -> None:
        """Report a bound if it is better."""
        with self._lock:
            if bound > self.bound * (1 + OPTIMAL_GAP):
                self.bound, self.source = bound, source
                if self.best is not None:
                    self._report(self.best)

    def _report_better(self, solution: Solution) -> None:
        if solution.value < self._reported * (1 - OPTIMAL_GAP):
            self._reported = solution.value
            self._report(solution)

    def _report(self, solution: Solution) -> None:
        # A contradicted bound ends the search, and its plan raises; it is not reported as progress.
        if self.on_progress is None or verdict(solution.value, self.bound) == "contradicted":
            return
        orders = without_useless_splits(self.problem, solution.orders)
        verify_orders(self.problem, orders)
        certificate = certify(self.problem, solution.value, self.bound, self.source)
        self.on_progress(
            Progress(
                objective=solution.value * self.unit,
                lower_bound=certificate.lower_bound * self.unit,
                gap=certificate.gap,
                method=solution.method,
                seconds=self.seconds,
                orders=orders,
                problem=self.problem,
            )
        )
