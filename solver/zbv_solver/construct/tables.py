"""A problem as compiled kernels read it: one small code per action, and tables by rank and code.

The code of an action is ``chunk * 4 + letter``. Microbatches of a stage and letter run in ascending order.
This loses nothing, as microbatches are alike: PROOFS.md, Lemma 1. So the number of earlier actions of a kind
implies the microbatch, and the order of a rank is a row of int8.

The forwards and backwards of a microbatch form one chain of 2S *positions*: position s is F of stage s, and
position 2S-1-s is its backward. Position q waits for position q-1 of the same microbatch. A W has no
position: it waits for its own I only, and nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.fusing import is_cheaper_fused
from zbv_solver.kernels.arrays import BoolArray, FloatArray, IntArray
from zbv_solver.problem.numeric import SEARCH_MEMORY
from zbv_solver.problem.problem import B, F, I, Problem

NO_POSITION = -1
"""Position of a W."""


class Tables(NamedTuple):
    """The numbers of a problem that compiled kernels read.

    Attributes
    ----------
    position
        (p, 4 * chunks) int64: the position of a code in the chain, ``NO_POSITION`` for W.
    duration, delta
        (p, 4 * chunks) float64: time, and change of the rank's memory.
    latency
        (2S,) float64: transfer time from position q-1 to q.
    host
        (2S,) int64: the rank of a position.
    static, limit
        (p,) float64. The limit includes the tolerance for rounding.
    fuse
        (p, chunks) bool: chunks whose backward is always the fused B.
    microbatches
        Their number m.
    """

    position: IntArray
    duration: FloatArray
    delta: FloatArray
    latency: FloatArray
    host: IntArray
    static: FloatArray
    limit: FloatArray
    fuse: BoolArray
    microbatches: int

    @property
    def pp_degree(self) -> int:
        """Number of ranks p."""
        return len(self.position)

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return int(self.position.shape[1]) // 4

    def loads(self, least: bool = False) -> FloatArray:
        """Busy time of every rank (p,): the marked chunks fused, or every chunk as is cheaper (``least``)."""
        forward, inputs, weights, fused = np.moveaxis(self.duration.reshape(self.pp_degree, -1, 4), 2, 0)
        split = inputs + weights
        backward = np.minimum(fused, split) if least else np.where(self.fuse, fused, split)
        loads: FloatArray = self.microbatches * (forward + backward).sum(axis=1)
        return loads


def make_tables(problem: Problem, fuse: BoolArray | None = None) -> Tables:
    """Tables of a problem; ``fuse`` (S,) marks stages that always use B (default: none)."""
    arrays, n = problem.arrays, problem.n_stages
    costs = arrays.of_equal()
    stages = np.array(problem.placement.stages_of, dtype=np.int64)
    p, chunks = stages.shape
    position = np.full((p, chunks, 4), NO_POSITION, dtype=np.int64)
    position[:, :, F] = stages
    position[:, :, I] = position[:, :, B] = 2 * n - 1 - stages
    slack = SEARCH_MEMORY * np.where(np.isfinite(arrays.limit), np.abs(arrays.limit), 0.0)
    fused = np.zeros(n, dtype=np.bool_) if fuse is None else fuse
    return Tables(
        position=position.reshape(p, 4 * chunks),
        duration=_by_code(costs.duration, stages),
        delta=_by_code(costs.delta, stages),
        # Position 0 has no input. Position S, the backward of the last stage, follows the F of the same
        # stage, so no transfer precedes it. Backwards use the forward latencies in reverse.
        latency=np.concatenate([[0.0], costs.latency, [0.0], costs.latency[::-1]]),
        host=np.concatenate([arrays.rank_of, arrays.rank_of[::-1]]).astype(np.int64),
        static=arrays.static.copy(),
        limit=arrays.limit + slack,
        fuse=fused[stages],
        microbatches=problem.microbatches,
    )


def fuse_options(problem: Problem) -> list[tuple[str, BoolArray]]:
    """Stages (S,) that a constructor runs with a fused backward, with a name per option.

    No stage; if fusing is cheaper anywhere, also the first stage (no stage waits for its I), and every stage
    where it is cheaper.
    """
    cheaper = is_cheaper_fused(problem)
    none = np.zeros(problem.n_stages, dtype=np.bool_)
    if not cheaper.any():
        return [("none", none)]
    first = none.copy()
    first[0] = cheaper[0]
    return [("none", none), ("first", first), ("all", cheaper)]


def _by_code(values: FloatArray, stages: IntArray) -> FloatArray:
    """(4, S) by letter and stage to (p, 4 * chunks) by rank and code."""
    p, chunks = stages.shape
    return np.ascontiguousarray(values[:, stages].transpose(1, 2, 0).reshape(p, 4 * chunks))
