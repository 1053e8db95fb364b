"""Which stages a constructor runs with their backward fused: one B in place of I and W."""

from __future__ import annotations

import numpy as np

from zbv_solver.bounds.fusing import is_cheaper_fused
from zbv_solver.kernels.arrays import BoolArray
from zbv_solver.problem.problem import Problem


def fuse_options(problem: Problem) -> list[tuple[str, BoolArray]]:
    """Named masks (S,): none; where B is cheaper, also the first stage (nothing waits for its I), and all."""
    cheaper = is_cheaper_fused(problem)
    none = np.zeros(problem.n_stages, dtype=np.bool_)
    if not cheaper.any():
        return [("none", none)]
    first = none.copy()
    first[0] = cheaper[0]
    return [("none", none), ("first", first), ("all", cheaper)]
