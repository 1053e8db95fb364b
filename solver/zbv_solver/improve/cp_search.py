"""CP-SAT improves an order: in windows of time, or as a whole, until an order is proved optimal.

A window keeps the order outside it, and CP-SAT reorders the actions inside (a large neighbourhood in the
sense of Shaw 1998). The whole problem is the window that nothing surrounds. The model is in
:mod:`.cp_model`. CP-SAT runs with one worker, within a budget that is counted in its deterministic time, so
that the result is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from zbv_solver.bounds.directions import may_fuse
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.cp_model import CpModel
from zbv_solver.improve.cp_sat import Amounts, FreeWindow, Paths, make_grid, make_solver, stopped_when
from zbv_solver.improve.cp_states import Implied, implied
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.numeric import OPTIMAL_GAP, STEP_ROUNDING
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

SIZES = (120, 60)
"""Actions in a window, on average: large windows find more, small ones are cheap."""
SIZES_DIFFERING = (30, 15)
"""The same, per rank, where microbatches differ: on many ranks, larger windows find more."""
EFFORT_PER_ACTION = 1.25e-4
"""CP-SAT's deterministic time for one window, per action."""
FIRST_PORTION = 32
"""The first question gets one part in this many of the effort."""
NEARLY_ALL = 0.9
NEAR = {"makespan": 0.01, "span": 0.001}
"""Relative distance of bound and value at which the last search begins."""
MOST_QUESTIONS = 200
"""Every question costs at least one part in this many of the effort, as presolve's time is hardly counted."""


@dataclass(frozen=True)
class Listener:
    """Functions that CP-SAT's thread calls while it searches the whole problem."""

    on_solution: Callable[[Orders, float], None] = lambda orders, value: None
    """Called with every better order and its objective."""
    on_bound: Callable[[float], None] = lambda bound: None
    """Called with every better proven bound."""


SILENT = Listener()


@dataclass(frozen=True)
class ExactResult:
    """The result of a search of the whole problem."""

    orders: Orders | None
    """The best order, or None when none better than the incumbent was found."""
    lower_bound: float
    """A proven bound on the objective in the problem's unit. If it is above the value of an order, one of the
    two is wrong, and :func:`zbv_solver.plans.plan.certify` reports it."""
    proved: bool
    """Whether the search space was exhausted: no order is better than the incumbent or ``orders``."""


def sweep_windows(
    problem: Problem,
    orders: Orders,
    *,
    effort: float,
    seed: int = 0,
    cancelled: Callable[[], bool] | None = None,
) -> Orders | None:
    """A better order, or None: windows over the whole order, of every size while one helps.

    Windows overlap by half and go from the end to the beginning, as pipelines lose most at the end. From the
    beginning they go on at the end.

    Parameters
    ----------
    orders
        A verified order.
    effort
        CP-SAT's deterministic time for the windows of one size: the same on every machine.
    cancelled
        As for :func:`refine`.
    """
    search = CpSearch(problem, orders, seed=seed, cancelled=cancelled)
    sizes = SIZES if problem.is_equal else tuple(size * problem.pp_degree for size in SIZES_DIFFERING)
    for size in sizes:
        window_effort = size * EFFORT_PER_ACTION
        count = max(1, math.ceil(2 * len(orders) / size))
        # ``fruitless`` counts windows since the last gain. After a full round without one, the next size
        # follows.
        fruitless, at = 0, count - 1
        for _ in range(math.floor(effort / window_effort)):
            if fruitless >= count or search.is_stopped():
                break
            length = search.value / count
            helped = search.improve((at - 0.5) * length, (at + 1.5) * length, window_effort)
            fruitless = 0 if helped else fruitless + 1
            at = at - 1 if at > 0 else count - 1
    return search.better


def refine(
    problem: Problem,
    incumbent: Orders,
    *,
    lower_bound: float,
    effort: float,
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
    cancelled
        Polled from another thread; the search ends soon after it turns true.
    listener
        Called from CP-SAT's thread with better orders and bounds.
    """
    search = CpSearch(problem, incumbent, seed=seed, cancelled=cancelled, listener=listener)
    search.solve_whole(lower_bound, effort)
    return ExactResult(search.better, search.bound, search.is_proved())


class _Stopped(Exception):
    """The search was cancelled."""


class CpSearch:
    """An order that CP-SAT makes better, and what is proved about it."""

    orders: Orders
    """The best order; equal microbatches ascend on every stage."""
    value: float
    """Its objective."""
    better: Orders | None
    """The best order if it is better than the first one."""
    bound: float
    """A proven bound on the objective."""

    def __init__(
        self,
        problem: Problem,
        orders: Orders,
        *,
        seed: int = 0,
        cancelled: Callable[[], bool] | None = None,
        listener: Listener = SILENT,
    ):
        self.problem, self.grid = problem, make_grid(problem)
        self.amounts: list[Amounts] | None = None
        if problem.memory.limit is not None:
            self.amounts = [Amounts.of(problem, rank) for rank in range(problem.pp_degree)]
        self.orders = self._ascending(orders)
        self.value, self.better = objective_of(problem, orders), None
        self.paths = Paths.of(self.grid, self.orders)
        self.bound, self.lower = 0.0, 0
        self.upper = self.grid.strictly_below(self.value)
        self.is_exhausted = self.is_misled = False
        self.passed_over = 1
        self.seed, self.cancelled, self.listener = seed, cancelled, listener
        self.known: list[Implied | None] = []

    def _ascending(self, orders: Orders) -> Orders:
        return first_in_first_out(orders, self.problem.n_stages, self.problem.arrays.kind_of)

    def is_stopped(self) -> bool:
        """Whether the search was cancelled."""
        return self.cancelled is not None and self.cancelled()

    def improve(self, begin: float, end: float, effort: float) -> bool:
        """Reorder what starts from ``begin`` until before ``end``; whether the order is better now.

        Times are in the problem's unit, on the clock of the earliest start (makespan) or of
        :func:`~zbv_solver.timing.start_times.span_start_times` (span). ``effort`` is CP-SAT's deterministic
        time.
        """
        unit = self.grid.steps * self.grid.parts
        window = FreeWindow.between(self.paths, self.orders, begin * unit, end * unit)
        # The model admits only objectives that are strictly better. With rounded costs, it may still find
        # orders that are not, hence the check of the true objective.
        most = self.grid.strictly_below(self.value)
        if window.floor > most or not len(window.free):
            return False
        model = CpModel(self.problem, self.grid, self.amounts, window, most)
        solver = make_solver(effort, self.seed)
        with stopped_when(self.cancelled, solver):
            status = solver.solve(model.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        return self._offer(model.orders(solver.value))

    def solve_whole(self, lower_bound: float, effort: float) -> None:
        """Search the whole problem until an order is proved optimal, or the effort is spent. Lemma 30.

        ``lower_bound`` is proven, in the problem's unit.
        """
        self.bound, self.lower = lower_bound, self.grid.at_least(lower_bound)
        self.effort = effort
        try:
            if self.problem.is_equal:
                self._close_in()
                self._finish()
            elif not self._is_over():
                # In any order of the microbatches, few questions of `_close_in` are easy; CP-SAT's cores
                # find and prove more within the same effort.
                self._solve(self.upper, self.effort, minimise=True, by_cores=True)
        except _Stopped:
            pass

    def is_proved(self) -> bool:
        """Whether no order is better than the best one."""
        # With slack in the grid, the search skips orders that are better by less than a step.
        return (self.is_exhausted and not self.grid.slack) or self.value <= self.bound * (1 + OPTIMAL_GAP)

    def _close_in(self) -> None:
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

    def _finish(self) -> None:
        """Spend the remaining effort between the bound and the best value.

        A makespan is minimised. For a span, the search asks for a constant T again and again: the constant
        turns every window into a difference constraint. With a variable T, CP-SAT may move the two bounds of
        T towards each other by single parts of the grid.
        """
        while not self._is_over():
            self._solve(self.upper, self.effort, minimise=self.problem.objective == "makespan")

    def _is_over(self) -> bool:
        if self.lower > self.upper and not self.is_misled:
            self.is_exhausted = True
        return self.is_proved() or self.effort <= 0 or self.lower > self.upper

    def _solve(
        self, most: int, effort: float, *, minimise: bool, by_cores: bool = False
    ) -> cp_model.CpSolverStatus:
        """Search for orders that take at most ``most`` parts."""
        self.known = self.known or self._implications()
        model = CpModel(
            self.problem,
            self.grid,
            self.amounts,
            FreeWindow.whole(self.paths, self.orders, self.lower),
            max(0, most),
            known=self.known,
            minimise=minimise,
            poll=self._poll,
        )
        solver = make_solver(effort, self.seed)
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

    def _implications(self) -> list[Implied | None]:
        """What memory implies on every rank, with work in parts of the grid."""
        fusable = np.flatnonzero(may_fuse(self.problem)).tolist()
        facts = []
        for rank in range(self.problem.pp_degree):
            self._poll()
            facts.append(implied(self.grid.problem, rank, fusable))
        return facts

    def _poll(self) -> None:
        if self.is_stopped():
            raise _Stopped

    def _offer(self, orders: Orders) -> bool:
        """Keep an order that is better by the true numbers; CP-SAT has seen rounded ones."""
        orders = self._ascending(orders)
        try:
            verify_orders(self.problem, orders)
        except InvalidPlan:  # rounded numbers misled CP-SAT
            return False
        value = objective_of(self.problem, orders)
        if value >= self.value:
            return False
        self.value, self.orders, self.better = value, orders, orders
        self.paths = Paths.of(self.grid, orders)
        self.upper = self.grid.strictly_below(value)
        self.listener.on_solution(orders, value)
        return True

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

    def __init__(self, offer: Callable[[Callable[[cp_model.IntVar], int]], object]):
        super().__init__()
        self.offer = offer

    def on_solution_callback(self) -> None:
        """CP-SAT found a solution."""
        self.offer(self.value)
