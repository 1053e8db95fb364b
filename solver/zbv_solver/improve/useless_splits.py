"""Replaces I and W by B where the split gains nothing: W takes no time, and B no longer than I.

Neither objective grows: nothing on the rank waits for W, and a B ends no later than its I. Nor does memory: B
frees at its end everything that I and W free. A rank then has one action less, and one less to launch.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, I, Problem, W


def without_useless_splits(problem: Problem, orders: Orders) -> Orders:
    """The orders with B for I and W in all stages where the split gains nothing."""
    duration = problem.arrays.duration
    is_useless = (duration[W] == 0) & (duration[B] <= duration[I])
    useless = is_useless[orders.stage, problem.arrays.kind_of[orders.microbatch]]
    kept = ~(useless & (orders.letter == W))
    letter = np.where(useless & (orders.letter == I), B, orders.letter)
    ranks = (orders.slice_of(rank) for rank in range(orders.pp_degree))
    rows = np.stack([orders.stage, letter, orders.microbatch], axis=1).astype(np.int32)
    return Orders.of_rows([rows[part][kept[part]] for part in ranks])
