"""Real numbers as the integers that CP-SAT counts in, so that what it proves holds for the real ones.

Durations that have no common unit are rounded down, which relaxes the model: its bounds stay
valid, and an order found is timed with the true numbers afterwards.

Two things keep the integers exact where the numbers are:

- A span is the mean weight of a cycle of at most p ranks, hence a multiple of 1 / lcm(1 … p) grid steps:
  every step is divided so finely.
- Actions without duration could share one instant, and starts alone would not say which of them comes
  first. Every step is divided into more parts than there are actions, and an action without duration
  takes one part. A path gains less than a step from that, so rounding down gives the true length back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from zbv_solver.problem.numeric import OPTIMAL_GAP, STEP_ROUNDING, integer_scale
from zbv_solver.problem.problem import Costs, Problem

GRID = 1 << 20
"""Steps that the largest number is divided into when the numbers have no common unit."""
LARGEST_INTEGER = 1 << 40
FINEST = 1 << 20
"""Most parts that a step is divided into."""
CYCLE_PARTS = 64
"""Division of a step for a span whose exact one would be too fine."""


@dataclass(frozen=True)
class Grid:
    """A problem whose costs are integers, and the way back.

    Attributes
    ----------
    problem
        The problem with costs in parts.
    steps
        Steps per time unit.
    parts
        Parts per step.
    slack
        Steps by which a proven bound must be lowered: a span's starts may have to be rounded up.
    is_exact
        Whether no duration was rounded.
    """

    problem: Problem
    steps: float
    parts: int
    slack: int
    is_exact: bool

    def strictly_below(self, value: float) -> int:
        """The most parts that an order better than ``value`` may take."""
        return math.ceil(value * self.steps * (1 - OPTIMAL_GAP) - STEP_ROUNDING) * self.parts - 1

    def proven(self, parts: float) -> float:
        """The bound in time units that is proven when no order takes less than ``parts``."""
        return max(0, math.ceil(parts - STEP_ROUNDING) // self.parts - self.slack) / self.steps

    def at_least(self, bound: float) -> int:
        """The parts that every order takes when ``bound`` time units are proven."""
        if not self.is_exact:
            return 0
        return max(0, math.ceil(bound * self.steps * (1 - OPTIMAL_GAP) - STEP_ROUNDING) * self.parts)


def make_grid(problem: Problem) -> Grid:
    """The finest grid that a problem needs and CP-SAT bears."""
    arrays = problem.arrays
    most_parts = problem.max_actions + 1
    cycles, slack = 1, 0
    if problem.objective == "span" and problem.pp_degree > 1:
        cycles = math.lcm(*range(1, problem.pp_degree + 1))
        if cycles * most_parts > FINEST:
            cycles, slack = CYCLE_PARTS, 1
    times = np.concatenate([arrays.duration.ravel(), arrays.latency])
    most_steps = LARGEST_INTEGER // (cycles * most_parts)
    exact = integer_scale(times.tolist(), most_steps)
    scale = min(GRID, most_steps) / float(times.max()) if exact is None else exact
    to_steps = np.floor if exact is None else np.rint
    duration, transfer = to_steps(arrays.duration * scale), to_steps(arrays.latency * scale)
    parts = most_parts if bool((duration == 0).any()) else 1
    fine = cycles * parts
    forward, inputs, weights, fused = (tuple(map(float, row)) for row in np.maximum(1.0, duration * fine))
    costs = Costs(forward, inputs, weights, tuple(map(float, transfer * fine)), fused)
    return Grid(replace(problem, costs=costs), scale * cycles, parts, slack, exact is not None)
