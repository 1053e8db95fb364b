"""Large neighbourhoods: keep an order outside a window of time, reorder what starts inside it with CP-SAT.

What lies before the window gives every action inside a head, what lies after it a tail: the longest path to
the end of a rank. Inside, the order that minimises the largest end + tail is sought. For a span the ranks'
first starts stay where they are, and ends are counted from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.exact import make_solver, objective_of, stopped_when
from zbv_solver.improve.exact_grid import Grid, make_grid
from zbv_solver.improve.exact_memory import Action, Amounts, Expression, Pairs
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.timing.start_times import earliest_times, span_start_times
from zbv_solver.verify.verifier import verify_orders

IntArray = NDArray[np.int64]


def refine_window(
    problem: Problem,
    orders: Orders,
    begin: float,
    end: float,
    *,
    effort: float,
    seed: int = 0,
    time_limit: float | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Orders | None:
    """A better order that differs only in what starts from ``begin`` until before ``end``, or None.

    Parameters
    ----------
    orders
        A verified order with microbatches ascending per stage and letter.
    begin, end
        In the problem's time unit, on the clock of the order's earliest start (makespan) or of
        :func:`~zbv_solver.timing.start_times.span_start_times` (span).
    effort
        CP-SAT's deterministic time: the same on every machine.
    time_limit
        Seconds; a cap on top, which makes the result depend on the machine.
    """
    grid = make_grid(problem)
    frame = _Frame.of(grid, orders, begin, end)
    value = objective_of(problem, orders)
    most = grid.strictly_below(value)
    if frame.floor > most or not frame.free.any():
        return None
    window = _Window(problem, grid, orders, frame, most)
    solver = make_solver(effort, time_limit, seed)
    with stopped_when(cancelled, solver):
        status = solver.solve(window.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = window.orders(solver)
    try:
        verify_orders(problem, found)
    except InvalidPlan:  # rounded numbers misled CP-SAT
        return None
    return found if objective_of(problem, found) < value else None


def sweep_windows(
    problem: Problem,
    orders: Orders,
    *,
    effort: float,
    window_effort: float,
    actions: int = 150,
    seed: int = 0,
    time_limit: float | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Orders | None:
    """Windows of about ``actions`` actions over the whole order, overlapping by half, while one helps.

    Starts where pipelines lose most: at the end, going backwards. Returns the best order, or None.
    """
    until = None if time_limit is None else time.monotonic() + time_limit
    count = max(1, math.ceil(2 * len(orders) / actions))
    best, fruitless, at = orders, 0, count - 1
    for _ in range(math.floor(effort / window_effort)):
        left = None if until is None else until - time.monotonic()
        if fruitless >= count or (left is not None and left <= 0) or (cancelled is not None and cancelled()):
            break
        length = objective_of(problem, best) / count
        found = refine_window(
            problem,
            best,
            (at - 0.5) * length,
            (at + 1.5) * length,
            effort=window_effort,
            seed=seed,
            time_limit=left,
            cancelled=cancelled,
        )
        fruitless = 0 if found is not None else fruitless + 1
        best = best if found is None else found
        at = at - 1 if at > 0 else count - 1
    return None if best is orders else best


@dataclass(frozen=True, eq=False)
class _Frame:
    """What the fixed part of an order imposes on its window; times in parts of the grid, arrays (n,).

    Attributes
    ----------
    start
        Of the order as it is.
    free
        Whether an action is in the window.
    head, tail
        Earliest start, and time from the end to the latest end of a rank; of free actions.
    floor
        Largest end + tail of paths outside the window: no order of the window gets below.
    """

    start: IntArray
    free: NDArray[np.bool_]
    head: IntArray
    tail: IntArray
    floor: int

    @classmethod
    def of(cls, grid: Grid, orders: Orders, begin: float, end: float) -> _Frame:
        """Longest paths through the fixed actions before and after a window."""
        problem = grid.problem
        is_span = problem.objective == "span"
        timed = span_start_times(problem, orders) if is_span else earliest_times(problem, orders)[0]
        start = np.floor(timed).astype(np.int64)
        length = problem.arrays.duration.astype(np.int64)[orders.letter, orders.stage]
        unit = grid.steps * grid.parts
        free = (start >= begin * unit) & (start < end * unit)
        before = start < begin * unit
        n = len(orders)
        first, last = orders.offset[:-1], orders.offset[1:] - 1
        opens = np.where(is_span, start[first], 0)[orders.rank_index()]
        after, delays = _successors(problem, orders)
        previous = np.arange(n) - 1
        previous[first] = -1
        following = np.arange(n) + 1
        following[last] = -1
        head, tail = opens.copy(), np.full(n, np.iinfo(np.int64).min // 2)
        floor = 0
        for at in np.argsort(-start, kind="stable").tolist():
            if following[at] < 0:
                tail[at] = -opens[at]
            successors = [(int(following[at]), 0)] if following[at] >= 0 else []
            successors += list(zip(after[at], delays[at], strict=True))
            for successor, delay in successors:
                if not free[successor]:
                    tail[at] = max(tail[at], delay + length[successor] + tail[successor])
                elif before[at]:
                    head[successor] = max(head[successor], start[at] + length[at] + delay)
            if before[at]:
                floor = max(floor, int(start[at] + length[at] + tail[at]))
        for rank in range(problem.pp_degree):
            inside = np.flatnonzero(free[orders.slice_of(rank)]) + orders.offset[rank]
            if len(inside):  # any of them may come first or last
                early, late = previous[inside[0]], following[inside[-1]]
                since = start[early] + length[early] if early >= 0 else opens[inside[0]]
                until = length[late] + tail[late] if late >= 0 else -opens[inside[0]]
                head[inside] = np.maximum(head[inside], since)
                tail[inside] = np.maximum(tail[inside], until)
        return cls(start, free, head, tail, floor)


def _successors(problem: Problem, orders: Orders) -> tuple[list[list[int]], list[list[int]]]:
    """Of every action, the actions of other letters or stages that need it, and the transfer's latency."""
    index: dict[tuple[int, int, int], int] = {}
    rows = list(zip(orders.letter.tolist(), orders.stage.tolist(), orders.microbatch.tolist(), strict=True))
    for at, (letter, stage, j) in enumerate(rows):
        index[I if letter == B else letter, stage, j] = at
    transfer = [int(lag) for lag in problem.arrays.transfer]
    after: list[list[int]] = [[] for _ in rows]
    delays: list[list[int]] = [[] for _ in rows]
    for at, (letter, stage, j) in enumerate(rows):
        needs: list[tuple[tuple[int, int, int], int]] = []
        if letter == F and stage > 0:
            needs.append(((F, stage - 1, j), transfer[stage - 1]))
        if letter in (I, B):
            needs.append(((F, stage, j), 0))
            if stage + 1 < problem.n_stages:
                needs.append(((I, stage + 1, j), transfer[stage]))
        if letter == W:
            needs.append(((I, stage, j), 0))
        for need, lag in needs:
            after[index[need]].append(at)
            delays[index[need]].append(lag)
    return after, delays


class _Window:
    """The model of a window: one start per free action."""

    def __init__(self, problem: Problem, grid: Grid, orders: Orders, frame: _Frame, most: int):
        self.problem, self.incumbent, self.frame = problem, orders, frame
        self.model = cp_model.CpModel()
        self.duration: list[list[int]] = grid.problem.arrays.duration.astype(np.int64).tolist()
        self.action: dict[int, Action] = {
            int(at): (int(orders.letter[at]), int(orders.stage[at]), int(orders.microbatch[at]))
            for at in np.flatnonzero(frame.free)
        }
        self.begin: dict[Action, cp_model.IntVar] = {}
        objective = self.model.new_int_var(frame.floor, most, "objective")
        for at, action in self.action.items():
            latest = most - int(frame.tail[at]) - self.duration[action[0]][action[1]]
            low = int(frame.head[at])
            self.begin[action] = self.model.new_int_var(low, max(low, latest), str(action))
            self.model.add(self.end(action) + int(frame.tail[at]) <= objective)
            self.model.add_hint(self.begin[action], int(frame.start[at]))
        self.model.minimize(objective)
        self._follow_dependencies(grid.problem)
        self._order_microbatches()
        for rank in range(problem.pp_degree):
            self._order_rank(rank)

    def start(self, action: Action) -> cp_model.IntVar:
        """Start of a free action."""
        return self.begin[action]

    def end(self, action: Action) -> Expression:
        """End of a free action."""
        return self.begin[action] + self.duration[action[0]][action[1]]

    def _follow_dependencies(self, problem: Problem) -> None:
        """An action inside the window waits for those inside that it needs, and their transfers."""
        after, delays = _successors(problem, self.incumbent)
        for at, action in self.action.items():
            for successor, delay in zip(after[at], delays[at], strict=True):
                if successor in self.action:
                    self.model.add(self.start(self.action[successor]) >= self.end(action) + delay)

    def _order_microbatches(self) -> None:
        """Microbatches of a stage run in ascending order: F's, backwards of both kinds, W's."""
        previous: dict[tuple[int, int], Action] = {}
        for action in sorted(self.begin, key=lambda a: a[2]):
            chain = (_kind(action), action[1])
            if chain in previous:
                self.model.add(self.start(action) >= self.end(previous[chain]))
            previous[chain] = action

    def _order_rank(self, rank: int) -> None:
        """A rank runs one action at a time, and what it holds fits its limit."""
        part = range(self.incumbent.slice_of(rank).start, self.incumbent.slice_of(rank).stop)
        actions = [self.action[at] for at in part if at in self.action]
        self.model.add_no_overlap(
            [
                self.model.new_fixed_size_interval_var(self.start(a), self.duration[a[0]][a[1]], "")
                for a in actions
            ]
        )
        if self.problem.memory.limit is None or not actions:
            return
        amounts = Amounts.of(self.problem, rank)
        for stage in self.problem.placement.stages_of[rank]:
            amounts.delta[B, stage] = amounts.delta[I, stage] + amounts.delta[W, stage]
        held = 0
        for at in part:
            if at in self.action:
                break
            held += amounts.delta[int(self.incumbent.letter[at]), int(self.incumbent.stage[at])]
        pairs = Pairs(self.model, self.start, self.end, _is_known)
        for action in actions:
            if amounts.delta[action[:2]] > 0:
                pairs.fits(action, actions, amounts, held, [])

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """The incumbent with the window's actions in the order found."""
        incumbent, ranks = self.incumbent, []
        for rank in range(self.problem.pp_degree):
            part = incumbent.slice_of(rank)
            places = [at for at in range(part.start, part.stop) if at in self.action]
            found = sorted(places, key=lambda at: solver.value(self.begin[self.action[at]]))
            at_place = dict(zip(places, found, strict=True))
            moved = [at_place.get(at, at) for at in range(part.start, part.stop)]
            columns = (incumbent.stage[moved], incumbent.letter[moved], incumbent.microbatch[moved])
            ranks.append(list(zip(*(column.tolist() for column in columns), strict=True)))
        return Orders.pack(ranks)


def _kind(action: Action) -> int:
    return I if action[0] == B else action[0]


def _is_known(first: Action, second: Action) -> bool:
    """Whether the microbatches' order puts the first action before the second."""
    return (
        first[1] == second[1] and first[2] <= second[2] and _kind(first) <= _kind(second) and first != second
    )
