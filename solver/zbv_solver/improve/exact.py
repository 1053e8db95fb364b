"""The whole problem as an exact CP-SAT model: proves small cases optimal, improves larger ones.

The model is in :mod:`.exact_model`; this module runs it within a budget counted in CP-SAT's deterministic
time, with one worker, so that the same question gets the same answer on every machine.
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
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import OPTIMAL_GAP, STEP_ROUNDING
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

POLL_SECONDS = 0.02
FIRST_PORTION = 32
"""The first question about a span gets this part of the effort."""
NEARLY_ALL = 0.9
NEAR = {"makespan": 0.01, "span": 0.001}
"""Distance of bound and value, as a share, at which the last search begins."""
MOST_QUESTIONS = 200
"""No question is free: presolve's time is hardly counted."""

OnSolution = Callable[[Orders, float], None]
OnBound = Callable[[float], None]


@dataclass(frozen=True)
class ExactResult:
    """What CP-SAT found.

    Attributes
    ----------
    orders
        The best order, or None when none better than the incumbent was found.
    lower_bound
        A proven bound on the objective in the problem's unit. Where it is above what an order reaches, one of
        the two is wrong: :func:`zbv_solver.plans.certificate.certify` finds that out.
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
    on_solution: OnSolution | None = None,
    on_bound: OnBound | None = None,
) -> ExactResult:
    """Search the whole problem for orders better than the incumbent, until one is proved best.

    Parameters
    ----------
    incumbent
        A verified order with microbatches ascending; only better ones are looked for.
    lower_bound
        A proven bound, in the problem's unit.
    effort
        CP-SAT's deterministic time: the same on every machine.
    time_limit
        Seconds; a cap on top, which makes the result depend on the machine.
    cancelled
        Polled from another thread; the search ends soon after it turns true.
    on_solution
        Called with every better order and its objective, from CP-SAT's thread.
    on_bound
        Called with every better proven bound, from CP-SAT's thread.
    """
    run = _Run(problem, incumbent, lower_bound, effort, time_limit, seed, cancelled, on_solution, on_bound)
    try:
        run.close_in()
        run.finish()
    except _Stopped:
        pass
    return ExactResult(run.found, run.bound, run.is_proved())


def make_solver(effort: float, time_limit: float | None, seed: int) -> cp_model.CpSolver:
    """A solver with the parameters that proved fastest on pipelines (see the comments)."""
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = seed
    parameters.max_deterministic_time = effort
    if time_limit is not None:
        parameters.max_time_in_seconds = max(0.01, time_limit)
    # The model's literals say what the linear relaxation and the precedence propagator would find out, each
    # of which costs more time than the conflicts that it saves.
    parameters.linearization_level = 0
    parameters.use_precedences_in_disjunctive_constraint = False
    parameters.cp_model_probing_level = 0
    parameters.use_new_integer_conflict_resolution = True
    # OR-Tools 9.15 proves false optima where presolve looks for sets included in others (its issue 5293; a
    # case of ours is in tests/solver/partition/test_least_memory.py). A certificate is worth more than what it saves.
    parameters.presolve_inclusion_work_limit = 0
    # It would take Ctrl-C over, and leave it with the system's default when it is done: sudden death.
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
        on_solution: OnSolution | None,
        on_bound: OnBound | None,
    ):
        self.problem, self.grid = problem, make_grid(problem)
        self.best, self.value = incumbent, objective_of(problem, incumbent)
        self.found: Orders | None = None
        self.bound, self.lower = bound, self.grid.at_least(bound)
        self.upper = self.grid.strictly_below(self.value)
        self.is_exhausted = self.is_misled = False
        self.passed_over = 1
        self.effort, self.seed = effort, seed
        self.until = None if time_limit is None else time.monotonic() + time_limit
        self.cancelled, self.on_solution, self.on_bound = cancelled, on_solution, on_bound
        self.known: list[Implied | None] = []

    def is_proved(self) -> bool:
        """Whether no order is better than the best one."""
        # Where the grid has a slack, the search has passed over orders that are better by less than a step.
        return (self.is_exhausted and not self.grid.slack) or self.value <= self.bound * (1 + OPTIMAL_GAP)

    def close_in(self) -> None:
        """Ask whether an order takes at most T, for T between what is proven and what is reached.

        Every answer moves one of the two, mostly by half their distance, where minimising creeps from one
        solution to the next. Where a question is too hard, the next one is nearer to what is reached and
        gets twice the effort.
        """
        share, portion = 0.5, self.effort / FIRST_PORTION
        near = NEAR[self.problem.objective]
        while not self._is_over() and share < NEARLY_ALL and self.upper - self.lower > near * self.upper:
            most = self.lower + math.floor((self.upper - self.lower) * share)
            status = self._solve(most, min(portion, self.effort), minimise=False)
            if status == cp_model.UNKNOWN:
                share, portion = (1 + share) / 2, 2 * portion

    def finish(self) -> None:
        """Spend what effort is left between what is proven and what is reached.

        A makespan is minimised. For a span a constant T is asked for again and again: it makes every window
        a difference constraint, while CP-SAT may push the two bounds of a variable one against each other by
        single parts of the grid.
        """
        while not self._is_over():
            self._solve(self.upper, self.effort, minimise=self.problem.objective == "makespan")

    def _is_over(self) -> bool:
        if self.lower > self.upper and not self.is_misled:
            self.is_exhausted = True
        return self.is_proved() or self.effort <= 0 or self.lower > self.upper

    def _solve(self, most: int, effort: float, *, minimise: bool) -> cp_model.CpSolverStatus:
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
        """Orders that take ``most`` parts have been seen; rounded numbers may keep them from being better.

        Many orders may differ by rounding alone, so each time that this happens twice as many parts are
        passed over. What lies between is left open: the bound is then what is proven below it.
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
        """Judge an order by true numbers; rounded ones may have misled CP-SAT."""
        try:
            verify_orders(self.problem, orders)
        except InvalidPlan:
            return
        value = objective_of(self.problem, orders)
        if value < self.value:
            self.value, self.best, self.found = value, orders, orders
            self.upper = self.grid.strictly_below(value)
            if self.on_solution is not None:
                self.on_solution(orders, value)

    def _raise_bound(self, parts: float, most: int) -> None:
        """No order takes fewer than ``parts``, of those that the model admits: they take at most ``most``."""
        if not math.isfinite(parts):
            return
        parts = min(parts, most + 1)
        self.lower = max(self.lower, math.ceil(parts - STEP_ROUNDING))
        bound = self.grid.proven(parts)
        if bound > self.bound:
            self.bound = bound
            if self.on_bound is not None:
                self.on_bound(bound)


class _Solutions(cp_model.CpSolverSolutionCallback):
    """Hands every solution's values on."""

    def __init__(self, offer: Callable[[Callable[[cp_model.IntVar], int]], None]):
        super().__init__()
        self.offer = offer

    def on_solution_callback(self) -> None:
        """CP-SAT found a solution."""
        self.offer(self.value)


@contextmanager
def stopped_when(cancelled: Callable[[], bool] | None, solver: cp_model.CpSolver) -> Iterator[None]:
    """Stop the solver soon after ``cancelled`` turns true; CP-SAT itself reports only at solutions."""
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
