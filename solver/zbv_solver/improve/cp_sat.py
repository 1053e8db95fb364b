"""CP-SAT: its settings, and real numbers as its integers, such that its proofs hold for the real numbers.

Durations without a common unit are rounded down. This relaxes the model, so its bounds stay valid, and orders
are timed with the true numbers afterwards: Lemmas 24, 25 and 27. Two rules keep exact numbers exact:

- A span is the mean weight of a cycle of at most p ranks, hence a multiple of 1 / lcm(1 … p) grid steps. So
  every step is divided into that many.
- Actions without duration could share one instant, and starts alone would not determine their order. So every
  step is divided into more parts than there are actions, and an action without duration takes one part. A
  path grows by less than a step, so rounding down restores its true length.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from ortools.sat.python import cp_model

from zbv_solver.problem.arrays import ProblemArrays
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, OPTIMAL_GAP, STEP_ROUNDING, integer_scale
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.stages import Costs

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
