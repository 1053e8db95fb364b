"""The whole problem as an exact CP-SAT model: proves small plans optimal, and improves larger ones.

The model is in :mod:`.exact_model`. This module runs it with one worker, within a budget that is counted in
CP-SAT's deterministic time, so that the result is the same on every machine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ortools.sat.python import cp_model

from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.exact_grid import make_grid
from zbv_solver.improve.exact_model import ExactModel, implications
from zbv_solver.improve.exact_states import Implied
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.numeric import OPTIMAL_GAP, STEP_ROUNDING
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

POLL_SECONDS = 0.02
FIRST_PORTION = 32
"""The first question gets one part in this many of the effort."""
NEARLY_ALL = 0.9
NEAR = {"makespan": 0.01, "span": 0.001}
"""Relative distance of bound and value at which the last search begins."""
MOST_QUESTIONS = 200
"""Every question costs at least one part in this many of the effort, as presolve's time is hardly counted."""


@dataclass(frozen=True)
class Listener:
    """Functions that CP-SAT's thread calls while it searches.

    Attributes
    ----------
    on_solution
        Called with every better order and its objective.
    on_bound
        Called with every better proven bound.
    """

    on_solution: Callable[[Orders, float], None] = lambda orders, value: None
    on_bound: Callable[[float], None] = lambda bound: None


SILENT = Listener()


@dataclass(frozen=True)
class ExactResult:
    """The result of CP-SAT.

    Attributes
    ----------
    orders
        The best order, or None when none better than the incumbent was found.
    lower_bound
        A proven bound on the objective in the problem's unit. If it is above the value of an order, one of
        the two is wrong, and :func:`zbv_solver.plans.certificate.certify` reports it.
    proved
        Whether the search space was exhausted: no order is better than the incumbent or ``orders``.
    """

    orders: Orders | None
    lower_bound: float
    proved: bool


def refine(
    problem: Problem,
    incumbent: Orders,
    *,
    lower_bound: float,
    effort: float,
    time_limit: float | None = None,
    seed: int = 0,
    cancelled: Callable[[], bool] | None = None,
    listener: Listener = SILENT,
) -> ExactResult:
    """Search the whole problem for better orders than the incumbent, until one is proved optimal. Lemma 30.

    Parameters
    ----------
    incumbent
        A verified order; only better orders are searched.
    lower_bound
        A proven bound, in the problem's unit.
    effort
        CP-SAT's deterministic time: the same on every machine.
    time_limit
        Seconds; a cap on top, which makes the result depend on the machine.
    cancelled
        Polled from another thread; the search ends soon after it turns true.
    listener
        Called from CP-SAT's thread with better orders and bounds.
    """
    run = _Run(problem, incumbent, lower_bound, effort, time_limit, seed, cancelled, listener)
    try:
        if problem.is_equal:
            run.close_in()
            run.finish()
        else:
            run.search_by_cores()
    except _Stopped:
        pass
    return ExactResult(run.found, run.bound, run.is_proved())


def make_solver(effort: float, time_limit: float | None, seed: int) -> cp_model.CpSolver:
    """A solver with the parameters that were fastest on pipelines; the comments say why."""
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = seed
    parameters.max_deterministic_time = effort
    if time_limit is not None:
        parameters.max_time_in_seconds = max(0.01, time_limit)
    # The model's literals state what the linear relaxation and the precedence propagator would derive. Each
    # of the two costs more time than the conflicts that it avoids.
    parameters.linearization_level = 0
    parameters.use_precedences_in_disjunctive_constraint = False
    parameters.cp_model_probing_level = 0
    parameters.use_new_integer_conflict_resolution = True
    # OR-Tools 9.15 proves false optima when presolve searches for included sets (its issue 5293;
    # tests/solver/partition/test_least_memory.py has a case). A correct certificate is worth the lost time.
    parameters.presolve_inclusion_work_limit = 0
    # CP-SAT would replace the handler of Ctrl-C and then leave the system's default, which kills the process.
    parameters.catch_sigint_signal = False
    return solver


class _Stopped(Exception):
    """The search was cancelled, or its time is over."""


class _Run:
    """State of one search: the best order, the best bound, and the effort left."""

    def __init__(
        self,
        problem: Problem,
        incumbent: Orders,
        bound: float,
        effort: float,
        time_limit: float | None,
        seed: int,
        cancelled: Callable[[], bool] | None,
        listener: Listener,
    ):
        self.problem, self.grid = problem, make_grid(problem)
        self.best = first_in_first_out(incumbent, problem.n_stages, problem.arrays.kind_of)
        self.value = objective_of(problem, incumbent)
        self.found: Orders | None = None
        self.bound, self.lower = bound, self.grid.at_least(bound)
        self.upper = self.grid.strictly_below(self.value)
        self.is_exhausted = self.is_misled = False
        self.passed_over = 1
        self.effort, self.seed = effort, seed
        self.until = None if time_limit is None else time.monotonic() + time_limit
        self.cancelled, self.listener = cancelled, listener
        self.known: list[Implied | None] = []

    def is_proved(self) -> bool:
        """Whether no order is better than the best one."""
        # With slack in the grid, the search skips orders that are better by less than a step.
        return (self.is_exhausted and not self.grid.slack) or self.value <= self.bound * (1 + OPTIMAL_GAP)

    def close_in(self) -> None:
        """Ask whether an order takes at most T, for T between the bound and the best value.

        Every answer moves one of the two, mostly by half of their distance, while minimising would creep from
        one solution to the next. If a question is too hard, the next one is closer to the best value and gets
        twice the effort.
        """
        share, portion = 0.5, self.effort / FIRST_PORTION
        near = NEAR[self.problem.objective]
        while not self._is_over() and share < NEARLY_ALL and self.upper - self.lower > near * self.upper:
            most = self.lower + math.floor((self.upper - self.lower) * share)
            status = self._solve(most, min(portion, self.effort), minimise=False)
            if status == cp_model.UNKNOWN:
                share, portion = (1 + share) / 2, 2 * portion

    def finish(self) -> None:
        """Spend the remaining effort between the bound and the best value.

        A makespan is minimised. For a span, the search asks for a constant T again and again: the constant
        turns every window into a difference constraint. With a variable T, CP-SAT may move the two bounds of
        T towards each other by single parts of the grid.
        """
        while not self._is_over():
            self._solve(self.upper, self.effort, minimise=self.problem.objective == "makespan")

    def search_by_cores(self) -> None:
        """Spend the effort on one search by CP-SAT's cores, where microbatches differ.

        In any order of the microbatches, few questions of :meth:`close_in` are easy; cores find and prove
        more within the same effort.
        """
        if not self._is_over():
            self._solve(self.upper, self.effort, minimise=True, by_cores=True)

    def _is_over(self) -> bool:
        if self.lower > self.upper and not self.is_misled:
            self.is_exhausted = True
        return self.is_proved() or self.effort <= 0 or self.lower > self.upper

    def _solve(
        self, most: int, effort: float, *, minimise: bool, by_cores: bool = False
    ) -> cp_model.CpSolverStatus:
        """Search for orders that take at most ``most`` parts."""
        self.known = self.known or implications(self.problem, self.grid, self._poll)
        model = ExactModel(
            self.problem,
            self.grid,
            lower=self.lower,
            upper=most,
            known=self.known,
            minimise=minimise,
            poll=self._poll,
        )
        model.hint(self.best)
        solver = make_solver(effort, self._seconds_left(), self.seed)
        solver.parameters.optimize_with_core = by_cores
        if minimise:
            solver.best_bound_callback = lambda parts: self._raise_bound(parts, most)
        with stopped_when(self.cancelled, solver):
            status = solver.solve(model.model, _Solutions(lambda value: self._offer(model.orders(value))))
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"CP-SAT rejects the model: {model.model.validate()}")
        self.effort -= max(solver.deterministic_time, self.effort / MOST_QUESTIONS)
        if status == cp_model.INFEASIBLE:
            self.is_exhausted = most >= self.upper and not self.is_misled
            self._raise_bound(most + 1, most)
        elif minimise and status == cp_model.OPTIMAL:
            self._raise_bound(solver.best_objective_bound, most)
            self._step_below(math.floor(solver.best_objective_bound + 0.5))
        elif not minimise and status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self._step_below(most)
        self._poll()
        return status

    def _step_below(self, most: int) -> None:
        """Go below ``most`` parts: CP-SAT has found such orders, but by true numbers they may not be better.

        Many orders may differ by rounding alone, so twice as many parts are skipped each time. Nothing is
        claimed about the skipped parts: the bound stays below them.
        """
        if self.upper >= most:
            self.upper, self.passed_over = most - self.passed_over, 2 * self.passed_over
            self.is_misled = True

    def _poll(self) -> None:
        left = self._seconds_left()
        if (self.cancelled is not None and self.cancelled()) or (left is not None and left <= 0):
            raise _Stopped

    def _seconds_left(self) -> float | None:
        return None if self.until is None else self.until - time.monotonic()

    def _offer(self, orders: Orders) -> None:
        """Verify and time an order with the true numbers; CP-SAT has seen rounded ones."""
        try:
            verify_orders(self.problem, orders)
        except InvalidPlan:
            return
        value = objective_of(self.problem, orders)
        if value < self.value:
            self.value, self.best, self.found = value, orders, orders
            self.upper = self.grid.strictly_below(value)
            self.listener.on_solution(orders, value)

    def _raise_bound(self, parts: float, most: int) -> None:
        """Raise the bound: no order takes fewer than ``parts``, of those that take at most ``most``."""
        if not math.isfinite(parts):
            return
        parts = min(parts, most + 1)
        self.lower = max(self.lower, math.ceil(parts - STEP_ROUNDING))
        bound = self.grid.proven(parts)
        if bound > self.bound:
            self.bound = bound
            self.listener.on_bound(bound)


class _Solutions(cp_model.CpSolverSolutionCallback):
    """Passes on the values of every solution."""

    def __init__(self, offer: Callable[[Callable[[cp_model.IntVar], int]], None]):
        super().__init__()
        self.offer = offer

    def on_solution_callback(self) -> None:
        """CP-SAT found a solution."""
        self.offer(self.value)


@contextmanager
def stopped_when(cancelled: Callable[[], bool] | None, solver: cp_model.CpSolver) -> Iterator[None]:
    """Stop the solver soon after ``cancelled`` turns true; CP-SAT itself calls back only at solutions."""
    if cancelled is None:
        yield
        return
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_SECONDS):
            if cancelled():
                solver.stop_search()

    watcher = threading.Thread(target=watch, name="cp-sat-cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join(timeout=1)
