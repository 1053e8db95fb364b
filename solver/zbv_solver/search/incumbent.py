"""What a search has found so far, and the race of two chains for better orders.

The incumbent keeps the best orders and the best bound, and reports them. Two chains of a phase race: one
search with two seeds, on two threads if the caller allows. At the end of the race the results are combined in
the order of the chains, so threads change the time but not the plan. :class:`Halt` stops the kernels of a
chain, or of the whole search, at a deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from zbv_solver.kernels.jit import IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import certify, verdict
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.problem.problem import B, I, Problem, W
from zbv_solver.verify.verifier import verify_orders

if TYPE_CHECKING:
    from zbv_solver.construct.board import Attempt


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

    @classmethod
    def of(cls, attempt: Attempt) -> Solution:
        """The order that a constructor made."""
        return cls(attempt.value, attempt.orders, attempt.method)


class Incumbent:
    """The best orders and the best bound so far, in the unit of the search.

    Chains may report to it from several threads. ``problem`` is the caller's.
    """

    def __init__(self, problem: Problem, unit: float, on_progress: OnProgress | None):
        self.problem, self.unit, self.on_progress = problem, unit, on_progress
        self.bound, self.source = 0.0, "bounds"
        self.current: Solution | None = None  # the order that the phases of the search improve
        # A better order that most phases cannot start from, because its stages run the microbatches in
        # different orders. Annealing and CP-SAT can.
        self.reserve: Solution | None = None
        self.bests: list[Solution] = []  # the best order of every chain of every race
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


CHAINS = 2


POLL_SECONDS = 0.05


LEAST_SECONDS = 1e-6
"""Shortest time until a deadline."""


class Halt:
    """Says when to stop: at a deadline, or when ``cancelled`` returns True. A context manager."""

    def __init__(self, cancelled: Callable[[], bool] | None, deadline: float | None):
        self.flag: IntArray = np.zeros(1, np.uint8)  # kernels poll it; 1 once it is time to stop
        self.reason: str | None = None  # "cancelled" or "time limit" once it is time to stop
        self._cancelled, self._deadline = cancelled, deadline
        self._began = time.monotonic()
        self._finished = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Halt:
        if self._cancelled is not None or self._deadline is not None:
            self._watcher = threading.Thread(target=self._watch, name="halt", daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._watcher is not None:
            self._watcher.join(timeout=1)

    def check(self) -> bool:
        """Whether it is time to stop."""
        if self.reason is None:
            if self._cancelled is not None and self._cancelled():
                self.stop("cancelled")
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self.stop("time limit")
        return self.reason is not None

    def stop(self, reason: str) -> None:
        """Stop now."""
        self.reason = reason
        self.flag[0] = 1

    def spent(self, share: float = 1.0) -> float:
        """Elapsed fraction of the time until the deadline, or of its first ``share``; 0 without one."""
        if self._deadline is None:
            return 0.0
        seconds = self._deadline - self._began
        return (time.monotonic() - self._began) / max(share * seconds, LEAST_SECONDS)

    def within(self, seconds: float | None) -> AbstractContextManager[Halt]:
        """One that also stops after so much time, or this one without such a limit."""
        if seconds is None:
            return nullcontext(self)
        return Halt(self.check, time.monotonic() + seconds)

    def _watch(self) -> None:
        while not self._finished.wait(POLL_SECONDS):
            if self.check():
                return


def without_useless_splits(problem: Problem, orders: Orders) -> Orders:
    """The orders with B for I and W in all stages where the split gains nothing: W takes no time, and B no
    longer than I.

    Neither objective grows: nothing on the rank waits for W, and a B ends no later than its I. Nor does
    memory: B frees at its end everything that I and W free. A rank then has one action less to launch.
    """
    if orders.paired is not None:  # without I there would be another pair
        return orders
    duration = problem.arrays.duration
    is_useless = (duration[W] == 0) & (duration[B] <= duration[I])
    useless = is_useless[orders.stage, problem.arrays.kind_of[orders.microbatch]]
    kept = ~(useless & (orders.letter == W))
    letter = np.where(useless & (orders.letter == I), B, orders.letter)
    ranks = (orders.slice_of(rank) for rank in range(orders.pp_degree))
    rows = np.stack([orders.stage, letter, orders.microbatch], axis=1).astype(np.int32)
    return Orders.of_rows([rows[part][kept[part]] for part in ranks])


Chain = Callable[[int, Halt], Iterator[Solution | None]]
"""The orders that a chain finds, by its number, and when it must stop. It yields None where it has found
none, so that it can be stopped there."""


def race(
    chain: Chain, incumbent: Incumbent, halt: Halt, *, workers: int = 1, seconds: float | None = None
) -> list[Solution]:
    """Run the chains; the best of their orders becomes the current one if it is better.

    Returns the best order of each chain, in the order of the chains.

    When a chain meets the bound, every other chain ends once it has made as many steps, so that the plan does
    not depend on which chain was faster. The race takes at most ``seconds``. A single worker runs the chains
    one after another, and they divide that time evenly.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    met: dict[int, int] = {}  # steps after which a chain met the bound

    def run(number: int) -> Solution | None:
        best = None
        running = 1 if workers > 1 else CHAINS - number
        left = None if deadline is None else (deadline - time.monotonic()) / running
        with halt.within(left) as stop:
            for step, solution in enumerate(chain(number, stop)):
                if solution is not None and (best is None or solution.value < best.value):
                    best = solution
                    incumbent.announce(best)
                    if incumbent.meets_bound(best):
                        met[number] = step
                is_last = any(step >= other for other in met.copy().values())
                if is_last or is_over(incumbent, halt) or stop.spent() >= 1:
                    break
        return best

    with ThreadPoolExecutor(min(workers, CHAINS)) as threads:
        try:
            bests = list(threads.map(run, range(CHAINS)))
        except BaseException:
            halt.stop("error")  # the other chain ends, too
            raise
    for number in sorted(range(CHAINS), key=lambda number: (met.get(number, math.inf), number)):
        best = bests[number]
        if best is not None and incumbent.is_improved_by(best.value):
            incumbent.accept(best)
    solutions = [best for best in bests if best is not None]
    incumbent.bests += solutions
    return solutions


def is_over(incumbent: Incumbent, halt: Halt) -> bool:
    """Whether a search must end: its order is optimal, or it has one and must stop."""
    return incumbent.best is not None and (incumbent.is_optimal or halt.check())
