"""The costs that a search computes with: the caller's, in a unit of the search's own.

A search decides by comparing sums of times. In the caller's unit, 0.1 + 0.2 and 0.3 differ, and the same
costs in seconds and in milliseconds tie in different places, so the plan would depend on the unit. Costs with
a common divisor become integers here, whose sums are exact; others become shares of the largest cost with
:data:`~zbv_solver.numeric.SIGNIFICANT_BITS` binary digits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zbv_solver.numeric import MIN_NUMBER, integer_scale, rounded_to_bits
from zbv_solver.problem import Costs, Problem

LARGEST_COST = 1 << 32
"""Integer costs up to this are exact in sums of a million of them."""


def in_search_unit(problem: Problem) -> tuple[Problem, float]:
    """The problem in the unit of the search, without its layers; and how long that unit is.

    Times of the returned problem, times that length, are times of the given one, up to rounding.
    """
    arrays, costs = problem.arrays, problem.costs
    times = np.concatenate([arrays.duration.ravel(), arrays.transfer])
    scale = integer_scale(times.tolist(), LARGEST_COST)
    largest = float(times.max())

    def converted(values: tuple[float, ...]) -> tuple[float, ...]:
        row = np.array(values, dtype=np.float64)
        found = rounded_to_bits(row / largest) if scale is None else np.rint(row * scale)
        return tuple(np.where(found < MIN_NUMBER, 0.0, found).tolist())

    own = Costs(
        converted(costs.forward),
        converted(costs.backward_input),
        converted(costs.backward_weight),
        converted(tuple(arrays.transfer.tolist())),
        None if costs.backward is None else converted(costs.backward),
    )
    return replace(problem, costs=own, model=None), largest if scale is None else 1 / scale
