"""CP-SAT: its settings, its integers for real numbers, and what surrounds a window of an order.

Durations without a common unit are rounded down. This relaxes the model, so its bounds stay valid, and orders
are timed with the true numbers afterwards: Lemmas 24, 25 and 27. Two rules keep exact numbers exact:

- A span is the mean weight of a cycle of at most p ranks, hence a multiple of 1 / lcm(1 … p) grid steps. So
  every step is divided into that many.
- Actions without duration could share one instant, and starts alone would not determine their order. So every
  step is divided into more parts than there are actions, and an action without duration takes one part. A
  path grows by less than a step, so rounding down restores its true length.

A window is a set of actions with consecutive start times, over all ranks. What runs before it gives every
action inside a head (its earliest start), and what runs after it a tail (the longest path from its end to the
end of a rank). For a span, ranks keep their first starts, and ends are counted from them. The whole problem
is the window that nothing surrounds: there, ranks choose their first starts as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from ortools.sat.python import cp_model

from zbv_solver.kernels.jit import IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, OPTIMAL_GAP, STEP_ROUNDING, integer_scale
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.stages import Costs, ProblemArrays
from zbv_solver.timing.start_times import earliest_times, span_start_times

Action = tuple[int, int, int]
"""(letter, stage, microbatch)"""


POLL_SECONDS = 0.02


GRID = 1 << 20
"""Number of steps in the largest number if the numbers have no common unit."""


LARGEST_INTEGER = 1 << 40


FINEST = 1 << 20
"""Largest number of parts in a step."""


CYCLE_PARTS = 64
"""Number of divisions of a step for a span if the exact number would be too large."""


@dataclass(frozen=True)
class Grid:
    """A problem with integer costs, and the conversion back."""

    problem: Problem
    """The problem with costs in parts."""
    steps: float
    """Steps per time unit."""
    parts: int
    """Parts per step."""
    slack: int
    """Steps by which a proven bound must be lowered, as starts of a span may be rounded up."""
    is_exact: bool
    """Whether no duration was rounded."""
    rounding: int
    """Steps that no path loses by rounding."""

    def strictly_below(self, value: float) -> int:
        """The most parts of an order that is better than ``value``."""
        return math.ceil(value * self.steps * (1 - OPTIMAL_GAP) - STEP_ROUNDING) * self.parts - 1

    def proven(self, parts: float) -> float:
        """The bound, in time units, that holds if no order takes fewer than ``parts``."""
        return max(0, math.ceil(parts - STEP_ROUNDING) // self.parts - self.slack) / self.steps

    def at_least(self, bound: float) -> int:
        """The least parts of every order if ``bound`` time units are proven."""
        lost = 0 if self.is_exact else self.rounding
        return max(0, math.ceil(bound * self.steps * (1 - OPTIMAL_GAP) - STEP_ROUNDING) - lost) * self.parts


def make_grid(problem: Problem) -> Grid:
    """The finest grid that a problem needs and CP-SAT can handle."""
    arrays = problem.arrays
    most_parts = problem.max_actions + 1
    cycles, slack = 1, 0
    if problem.objective == "span" and problem.pp_degree > 1:
        cycles = math.lcm(*range(1, problem.pp_degree + 1))
        if cycles * most_parts > FINEST:
            cycles, slack = CYCLE_PARTS, 1
    times = np.concatenate([arrays.duration.ravel(), arrays.latency.ravel()])
    most_steps = LARGEST_INTEGER // (cycles * most_parts)
    exact = integer_scale(times.tolist(), most_steps)
    # Sums for microbatches that differ rarely have a common unit. In a fine grid, CP-SAT's cores find more.
    finest = min(GRID, most_steps) if problem.is_equal else most_steps
    scale = finest / float(times.max()) if exact is None else exact
    to_steps = np.floor if exact is None else np.rint
    duration, transfer = to_steps(arrays.duration * scale), to_steps(arrays.latency * scale)
    parts = most_parts if bool((duration == 0).any()) else 1
    fine = cycles * parts
    in_parts = replace(arrays, duration=np.maximum(1.0, duration * fine), latency=transfer * fine)
    # Every action of a path, and every transfer, loses less than a step of the scale.
    rounding = 2 * problem.max_actions * cycles
    return Grid(_with(problem, in_parts), scale * cycles, parts, slack, exact is not None, rounding)


def _with(problem: Problem, arrays: ProblemArrays) -> Problem:
    """The problem with these durations and latencies."""
    if not problem.is_equal:
        return problem.with_arrays(arrays)
    forward, inputs, weights, fused = map(tuple, arrays.duration[:, :, 0].tolist())
    costs = Costs(forward, inputs, weights, tuple(arrays.latency[:, 0].tolist()), fused)
    # Equal microbatches may have features, which would add to the costs.
    plain = problem.averaged() if problem.features else problem
    return replace(plain, costs=costs)


@dataclass(frozen=True)
class Amounts:
    """Memory deltas and capacity of a rank as integers, rounded so that every order that fits still fits.

    Lemma 27.
    """

    delta: dict[tuple[int, int, int], int]
    """Of a (letter, stage, kind of microbatch)."""
    kind_of: list[int]
    """The kind of every microbatch."""
    capacity: int
    """Most that the actions may hold together, static memory excluded."""

    @classmethod
    def of(cls, problem: Problem, rank: int) -> Amounts:
        """Amounts of a rank whose limit is not None."""
        arrays = problem.arrays
        limit, static = float(arrays.limit[rank]), float(arrays.static[rank])
        stages = problem.placement.stages_of[rank]
        keys = [
            (letter, stage, kind) for letter in (F, I, W) for stage in stages for kind in range(arrays.kinds)
        ]
        true = np.array([arrays.delta[key] for key in keys])
        scale = integer_scale(true.tolist(), LARGEST_INTEGER)
        if scale is None:
            scale = GRID / float(np.abs(true).max())
            # A sum of rounded-down deltas is an integer and at most the true sum, so every order that fits
            # also fits the rounded-down capacity below.
            scaled = np.floor(true * scale)
        else:
            scaled = np.rint(true * scale)
        delta = dict(zip(keys, map(int, scaled.tolist()), strict=True))
        capacity = (limit - static + 2 * MEMORY_TOLERANCE * abs(limit)) * scale
        # More than the sum of all allocations is never needed; this keeps the integers small.
        count = arrays.count.tolist()
        most = sum(max(0, value) * count[kind] for (_, _, kind), value in delta.items())
        for stage, kind in product(stages, range(arrays.kinds)):
            delta[B, stage, kind] = delta[I, stage, kind] + delta[W, stage, kind]
        return cls(delta, arrays.kind_of.tolist(), min(math.floor(capacity), most))

    def change(self, action: Action) -> int:
        """The change of memory at an action."""
        letter, stage, microbatch = action
        return self.delta[letter, stage, self.kind_of[microbatch]]


def make_solver(effort: float, seed: int, time_limit: float | None = None) -> cp_model.CpSolver:
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
    # tests/solver/partition/test_cuts.py has a case). A correct certificate is worth the lost time.
    parameters.presolve_inclusion_work_limit = 0
    # CP-SAT would replace the handler of Ctrl-C and then leave the system's default, which kills the process.
    parameters.catch_sigint_signal = False
    return solver


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


NEVER = np.iinfo(np.int64).min // 2


BEFORE, INSIDE, AFTER, NOWHERE = range(4)
"""Where an action lies relative to a window."""


@dataclass(frozen=True, eq=False)
class Paths:
    """Longest paths through an order, in parts of the grid; arrays (n,) unless stated otherwise."""

    start: IntArray
    """Earliest starts."""
    end: IntArray
    """Earliest ends."""
    tail: IntArray
    """The longest path from the end to the end of a rank."""
    needs: IntArray
    """(n, 3) actions that must end before this one starts, -1 for none: its rank's previous one first."""
    latency: IntArray
    """(n, 3) the transfer times from them."""
    release: IntArray
    """First start of the action's rank."""

    @classmethod
    def of(cls, grid: Grid, orders: Orders) -> Paths:
        """Paths of an order under the grid's costs."""
        problem = grid.problem
        release = np.zeros(problem.pp_degree, np.int64)
        if problem.objective == "span":
            release = np.floor(span_start_times(problem, orders)[orders.offset[:-1]]).astype(np.int64)
        release = release[orders.rank_index()]
        length = problem.arrays.durations(orders.stage, orders.letter, orders.microbatch).astype(np.int64)
        needs, latency = _needs(problem, orders)
        # Every action takes at least one part, so an action ends later than all that it needs.
        sequence = np.argsort(earliest_times(problem, orders)[1]).tolist()
        rows = list(map(_present, needs.tolist(), latency.tolist()))
        end, tail = (release + length).tolist(), np.full(len(orders), NEVER)
        tail[orders.offset[1:] - 1] = -release[orders.offset[1:] - 1]
        lengths, tails = length.tolist(), tail.tolist()
        for at in sequence:
            for needed, lag in rows[at]:
                end[at] = max(end[at], end[needed] + lag + lengths[at])
        for at in reversed(sequence):
            for needed, lag in rows[at]:
                tails[needed] = max(tails[needed], tails[at] + lengths[at] + lag)
        ends = np.array(end, dtype=np.int64)
        return cls(ends - length, ends, np.array(tails, dtype=np.int64), needs, latency, release)


def _present(needs: list[int], latency: list[int]) -> list[tuple[int, int]]:
    """The actions that one needs, with the transfer times from them."""
    return [(needed, lag) for needed, lag in zip(needs, latency, strict=True) if needed >= 0]


def _needs(problem: Problem, orders: Orders) -> tuple[IntArray, IntArray]:
    """See :class:`Paths`."""
    n, stages = len(orders), problem.n_stages
    index = np.full((3, stages + 2, problem.microbatches), -1)  # a stage without actions at either end
    kind, stage, j = np.where(orders.letter == B, I, orders.letter), orders.stage + 1, orders.microbatch
    index[kind, stage, j] = np.arange(n)
    needs, latency = np.full((n, 3), -1), np.zeros((n, 3), np.int64)
    arrays = problem.arrays
    none = np.zeros((1, arrays.kinds))
    transfer = np.concatenate([none, arrays.latency, none]).astype(np.int64)
    kind_of = arrays.kind_of[orders.microbatch]
    for letter, above in ((F, -1), (I, 1), (W, 0)):
        own = np.flatnonzero(kind == letter)
        needs[own, 1] = index[min(letter, I), stage[own] + above, j[own]]
        latency[own, 1] = 0 if letter == W else transfer[stage[own] - (letter == F), kind_of[own]]
        if letter == I:
            needs[own, 2] = index[F, stage[own], j[own]]
    needs[:, 0] = np.arange(n) - 1
    needs[orders.offset[:-1], 0] = -1
    return needs, latency


@dataclass(frozen=True, eq=False)
class FreeWindow:
    """The free actions of an order, and what the others impose on them."""

    orders: Orders
    free: IntArray
    """(k,) the actions of the window."""
    start: IntArray
    """(k,) when they start in the order."""
    head: IntArray
    """(k,) earliest start by the actions before the window."""
    tail: IntArray
    """(k,) longest path through the actions after the window."""
    closing: IntArray
    """(k,) the part of the tail that follows from the rank alone."""
    floor: int
    """Largest end + tail of paths outside the window: no order of the window gets below."""
    is_whole: bool

    @classmethod
    def whole(cls, paths: Paths, orders: Orders, floor: int) -> FreeWindow:
        """The window of all actions; ``floor`` parts are a bound on the objective."""
        nothing = np.zeros(len(orders), np.int64)
        free = np.arange(len(orders))
        return cls(orders, free, paths.start, nothing, nothing, nothing, floor, True)

    @classmethod
    def between(cls, paths: Paths, orders: Orders, begin: float, end: float) -> FreeWindow:
        """What starts from ``begin`` until before ``end``."""
        n, start, offset = len(orders), paths.start, orders.offset
        place = np.where(start < begin, BEFORE, np.where(start < end, INSIDE, AFTER))
        place = np.append(place, NOWHERE)  # of action -1
        free = np.flatnonzero(place == INSIDE)
        head, tail, closing = paths.release.copy(), np.full(n, NEVER), np.full(n, NEVER)
        length = paths.end - start
        last = offset[1:] - 1
        ended = last[place[last] == BEFORE]
        floor = int((paths.end - paths.release)[ended].max(initial=0))
        for needed, latency in zip(paths.needs.T, paths.latency.T, strict=True):
            # ``needed`` is -1 for no predecessor: this index reads NOWHERE, which no comparison selects.
            enters = np.flatnonzero((place[needed] == BEFORE) & (place[:-1] == INSIDE))
            np.maximum.at(head, enters, paths.end[needed[enters]] + latency[enters])
            leaves = np.flatnonzero((place[needed] <= INSIDE) & (place[:-1] == AFTER))
            onward = latency[leaves] + length[leaves] + paths.tail[leaves]
            np.maximum.at(tail, needed[leaves], onward)
            # No order of the window can shorten a path that skips the window.
            outside = place[needed[leaves]] == BEFORE
            floor = max(floor, int((paths.end[needed[leaves]] + onward)[outside].max(initial=0)))
        # Starts ascend along a rank, so the free actions of a rank are consecutive there.
        for first, stop in pairwise(np.searchsorted(free, offset)):
            inside = free[first:stop]
            if len(inside):  # any of them may come first or last on its rank
                after = inside[-1] + 1
                is_last = after == n or paths.needs[after, 0] < 0
                until = -paths.release[inside[0]] if is_last else length[after] + paths.tail[after]
                previous = paths.needs[inside[0], 0]
                if previous >= 0:
                    head[inside] = np.maximum(head[inside], paths.end[previous])
                tail[inside] = np.maximum(tail[inside], until)
                closing[inside] = until
        return cls(orders, free, start[free], head[free], tail[free], closing[free], floor, False)
