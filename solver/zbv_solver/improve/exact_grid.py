"""Real numbers as the integers of CP-SAT, such that its proofs hold for the real numbers: Lemmas 24 and 25.

Durations without a common unit are rounded down. This relaxes the model, so its bounds stay valid, and orders
are timed with the true numbers afterwards.

Two rules keep exact numbers exact:

- A span is the mean weight of a cycle of at most p ranks, hence a multiple of 1 / lcm(1 … p) grid steps. So
  every step is divided into that many.
- Actions without duration could share one instant, and starts alone would not determine their order. So every
  step is divided into more parts than there are actions, and an action without duration takes one part. A
  path grows by less than a step, so rounding down restores its true length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from zbv_solver.problem.arrays import ProblemArrays
from zbv_solver.problem.costs import Costs
from zbv_solver.problem.numeric import OPTIMAL_GAP, STEP_ROUNDING, integer_scale
from zbv_solver.problem.problem import Problem

GRID = 1 << 20
"""Number of steps in the largest number if the numbers have no common unit."""
LARGEST_INTEGER = 1 << 40
FINEST = 1 << 20
"""Largest number of parts in a step."""
CYCLE_PARTS = 64
"""Number of divisions of a step for a span if the exact number would be too large."""


@dataclass(frozen=True)
class Grid:
    """A problem with integer costs, and the conversion back.

    Attributes
    ----------
    problem
        The problem with costs in parts.
    steps
        Steps per time unit.
    parts
        Parts per step.
    slack
        Number of steps by which a proven bound must be lowered, as starts of a span may be rounded up.
    is_exact
        Whether no duration was rounded.
    rounding
        Number of steps that no path loses by rounding.
    """

    problem: Problem
    steps: float
    parts: int
    slack: int
    is_exact: bool
    rounding: int

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
