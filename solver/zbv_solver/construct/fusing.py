"""Which stages may run their backward fused: as one B instead of I and W."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zbv_solver.problem.problem import Problem


def fuse_options(problem: Problem) -> list[tuple[str, NDArray[np.bool_]]]:
    """Named masks (S,): none; where B is cheaper, also the first stage (whose I feeds nobody), and all."""
    cheaper = cheaper_fused(problem)
    none = np.zeros(problem.n_stages, dtype=np.bool_)
    if not cheaper.any():
        return [("none", none)]
    first = none.copy()
    first[0] = cheaper[0]
    return [("none", none), ("first", first), ("all", cheaper)]


def cheaper_fused(problem: Problem) -> NDArray[np.bool_]:
    """Stages (S,) whose B takes less time than I and W."""
    costs = problem.costs
    return np.array(
        [
            costs.fused(stage) < costs.backward_input[stage] + costs.backward_weight[stage]
            for stage in range(problem.n_stages)
        ]
    )
