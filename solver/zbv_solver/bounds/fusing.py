"""Stages on which a fused backward B, in place of I and W, can pay."""

from __future__ import annotations

import numpy as np

from zbv_solver.kernels.arrays import BoolArray
from zbv_solver.problem.problem import B, I, Problem, W


def is_cheaper_fused(problem: Problem) -> BoolArray:
    """Stages (S,) whose B takes less time than I and W for some microbatch: a part of Lemma 2."""
    duration = problem.arrays.duration
    cheaper: BoolArray = (duration[B] < duration[I] + duration[W]).any(axis=1)
    return cheaper


def may_fuse(problem: Problem) -> BoolArray:
    """Stages (S,) where B can pay: it is cheaper, or I would grow memory under a limit. Lemma 2."""
    grows: BoolArray = (problem.arrays.delta[I] > 0).any(axis=1) & (problem.memory.limit is not None)
    return np.logical_or(is_cheaper_fused(problem), grows)
