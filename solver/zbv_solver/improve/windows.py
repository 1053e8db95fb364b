"""Large neighbourhoods: keep an order outside a window of time, and reorder the actions inside with CP-SAT.

A window is a set of actions with consecutive start times, over all ranks. What runs before the window gives
every action inside a head (its earliest start), and what runs after it a tail (the longest path from its end
to the end of a rank). CP-SAT minimises the largest end + tail (a large neighbourhood in the sense of Shaw
1998). For a span, ranks keep their first starts, and ends are counted from them. Equal microbatches of a
stage keep their order; others may overtake each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
from ortools.sat.python import cp_model

from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.exact import make_solver, stopped_when
from zbv_solver.improve.exact_grid import make_grid
from zbv_solver.improve.exact_memory import Action, Amounts, Expression, Pairs
from zbv_solver.improve.window_boundary import Boundary, Paths
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import B, I, Problem
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

SIZES = (120, 60)
"""Actions in a window, on average: large windows find more, small ones are cheap."""
SIZES_DIFFERING = (30, 15)
"""The same, per rank, where microbatches differ: on many ranks, larger windows find more."""
EFFORT_PER_ACTION = 1.25e-4
"""CP-SAT's deterministic time for one window, per action."""


def sweep_windows(
    problem: Problem,
    orders: Orders,
    *,
    effort: float,
    seed: int = 0,
    time_limit: float | None = None,
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
    time_limit
        Seconds; a cap on top, which makes the result depend on the machine.
    """
    search = WindowSearch(problem, orders, seed, time_limit, cancelled)
    before = search.value
    for size in usual_sizes(problem):
        window_effort = size * EFFORT_PER_ACTION
        count = max(1, math.ceil(2 * len(orders) / size))
        # ``fruitless`` counts windows since the last gain. After a full round without one, the next size
        # follows.
        fruitless, at = 0, count - 1
        for _ in range(math.floor(effort / window_effort)):
            if fruitless >= count or search.is_over():
                break
            length = search.value / count
            helped = search.improve((at - 0.5) * length, (at + 1.5) * length, window_effort)
            fruitless = 0 if helped else fruitless + 1
            at = at - 1 if at > 0 else count - 1
    return search.orders if search.value < before else None


def usual_sizes(problem: Problem) -> tuple[int, ...]:
    """Actions in a window, on average; larger windows come first."""
    if problem.is_equal:
        return SIZES
    return tuple(size * problem.pp_degree for size in SIZES_DIFFERING)


class WindowSearch:
    """An order that windows make better.

    Attributes
    ----------
    orders, value
        The best order, and its objective.
    """

    def __init__(
        self,
        problem: Problem,
        orders: Orders,
        seed: int = 0,
        time_limit: float | None = None,
        cancelled: Callable[[], bool] | None = None,
    ):
        self.problem, self.grid = problem, make_grid(problem)
        self.amounts: list[Amounts] = []
        if problem.memory.limit is not None:
            self.amounts = [Amounts.of(problem, rank) for rank in range(problem.pp_degree)]
        self.seed, self.cancelled = seed, cancelled
        self.until = None if time_limit is None else time.monotonic() + time_limit
        self._take(first_in_first_out(orders, problem.n_stages, problem.arrays.kind_of))

    def is_over(self) -> bool:
        """Whether the time is over, or the search was cancelled."""
        return (self.cancelled is not None and self.cancelled()) or (
            self.until is not None and time.monotonic() >= self.until
        )

    def improve(self, begin: float, end: float, effort: float) -> bool:
        """Reorder what starts from ``begin`` until before ``end``; whether the order is better now.

        Times are in the problem's unit, on the clock of the earliest start (makespan) or of
        :func:`~zbv_solver.timing.start_times.span_start_times` (span). ``effort`` is CP-SAT's deterministic
        time.
        """
        unit = self.grid.steps * self.grid.parts
        boundary = Boundary.of(self.paths, self.orders.offset, begin * unit, end * unit)
        # The model admits only objectives that are strictly better. With rounded costs, it may still find
        # orders that are not, hence the check of the true objective below.
        most = self.grid.strictly_below(self.value)
        if boundary.floor > most or not len(boundary.free):
            return False
        window = _WindowModel(self.problem, self.amounts, self.orders, self.paths, boundary, most)
        left = None if self.until is None else self.until - time.monotonic()
        solver = make_solver(effort, left, self.seed)
        with stopped_when(self.cancelled, solver):
            status = solver.solve(window.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        found = window.orders(solver)
        try:
            verify_orders(self.problem, found)
        except InvalidPlan:  # rounded numbers misled CP-SAT
            return False
        if objective_of(self.problem, found) >= self.value:
            return False
        self._take(found)
        return True

    def _take(self, orders: Orders) -> None:
        self.orders, self.value = orders, objective_of(self.problem, orders)
        self.paths = Paths.of(self.grid, orders)


class _WindowModel:
    """The CP-SAT model of a window: one start per free action."""

    def __init__(
        self,
        problem: Problem,
        amounts: list[Amounts],
        orders: Orders,
        paths: Paths,
        boundary: Boundary,
        most: int,
    ):
        self.problem, self.amounts, self.incumbent = problem, amounts, orders
        self.kind_of: list[int] = problem.arrays.kind_of.tolist()
        self.model = cp_model.CpModel()
        rows = zip(
            orders.letter[boundary.free],
            orders.stage[boundary.free],
            orders.microbatch[boundary.free],
            strict=True,
        )
        self.action: dict[int, Action] = {
            at: (int(letter), int(stage), int(j))
            for at, (letter, stage, j) in zip(boundary.free.tolist(), rows, strict=True)
        }
        length = (paths.end - paths.start)[boundary.free].tolist()
        self.length: dict[Action, int] = dict(zip(self.action.values(), length, strict=True))
        self.begin: dict[Action, cp_model.IntVar] = {}
        objective = self.model.new_int_var(boundary.floor, most, "objective")
        for (at, action), head, tail in zip(
            self.action.items(), boundary.head.tolist(), boundary.tail.tolist(), strict=True
        ):
            latest = most - tail - self.length[action]
            self.begin[action] = self.model.new_int_var(head, max(head, latest), str(action))
            self.model.add(self.end(action) + tail <= objective)
            self.model.add_hint(self.begin[action], int(paths.start[at]))
        self.model.minimize(objective)
        self._follow_dependencies(paths)
        self._order_microbatches()
        for rank in range(problem.pp_degree):
            self._order_rank(rank)

    def start(self, action: Action) -> cp_model.IntVar:
        """Start of a free action."""
        return self.begin[action]

    def end(self, action: Action) -> Expression:
        """End of a free action."""
        return self.begin[action] + self.length[action]

    def _follow_dependencies(self, paths: Paths) -> None:
        """An action waits for those inside the window that it needs, and their transfers."""
        inside = [
            (needed, at, latency)
            for at in self.action
            for needed, latency in zip(
                paths.needs[at, 1:].tolist(), paths.latency[at, 1:].tolist(), strict=True
            )
            if needed in self.action
        ]
        for needed, at, latency in sorted(inside):
            self.model.add(self.start(self.action[at]) >= self.end(self.action[needed]) + latency)

    def _order_microbatches(self) -> None:
        """Equal microbatches of a stage run in ascending order: F's, backwards of both kinds, W's."""
        previous: dict[tuple[int, int, int], Action] = {}
        for action in sorted(self.begin, key=lambda a: a[2]):
            chain = (_letter(action), action[1], self.kind_of[action[2]])
            if chain in previous:
                self.model.add(self.start(action) >= self.end(previous[chain]))
            previous[chain] = action

    def _order_rank(self, rank: int) -> None:
        """A rank runs one action at a time, and what it holds fits its limit."""
        part = range(self.incumbent.slice_of(rank).start, self.incumbent.slice_of(rank).stop)
        actions = [self.action[at] for at in part if at in self.action]
        self.model.add_no_overlap(
            [self.model.new_fixed_size_interval_var(self.start(a), self.length[a], "") for a in actions]
        )
        if not self.amounts or not actions:
            return
        amounts, held = self.amounts[rank], 0
        for at in part:
            if at in self.action:
                break
            old = self.incumbent
            held += amounts.change((int(old.letter[at]), int(old.stage[at]), int(old.microbatch[at])))
        pairs = Pairs(self.model, self.start, self.end, self._is_known)
        for action in actions:
            if amounts.change(action) > 0:
                pairs.fits(action, actions, amounts, held, [])

    def _is_known(self, first: Action, second: Action) -> bool:
        """Whether the first action precedes the second: by its letter, by the order of equal microbatches."""
        return (
            first[1] == second[1]
            and first[2] <= second[2]
            and self.kind_of[first[2]] == self.kind_of[second[2]]
            and _letter(first) <= _letter(second)
            and first != second
        )

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """The incumbent with the window's actions in the order found."""
        source = np.arange(len(self.incumbent))
        places = np.array(list(self.action))
        ranks = self.incumbent.rank_index()[places]
        found = np.array([solver.value(self.begin[action]) for action in self.action.values()])
        # ``places`` ascends, hence by rank; sorting by rank and start keeps every rank's actions in its
        # places. Starts of a rank are distinct, because every action takes at least one part.
        source[places] = places[np.lexsort((found, ranks))]
        old = self.incumbent
        return Orders(old.stage[source], old.letter[source], old.microbatch[source], old.offset)


def _letter(action: Action) -> int:
    return I if action[0] == B else action[0]
