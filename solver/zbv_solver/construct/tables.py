"""A problem as compiled kernels read it: one small code per action, and tables by rank and code.

The code of an action is ``chunk * 4 + letter``. Every stage and letter runs the microbatches in one order,
in which they enter the pipeline. Where microbatches are equal this loses nothing (PROOFS.md, Lemma 1), and
they enter in ascending order. So the number of earlier actions of a code implies the microbatch, and the
order of a rank is a row of int8. Kernels number microbatches by their place k in the order of entry.

The forwards and backwards of a microbatch form one chain of 2S *positions*: position s is F of stage s, and
position 2S-1-s is its backward. Position q waits for position q-1 of the same microbatch. A W has no
position: it waits for its own I only, and nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.bounds.directions import is_cheaper_fused
from zbv_solver.kernels.arrays import BoolArray, FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_leaf
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
        (p, 4 * chunks, K) float64: time, and change of the rank's memory, by kind of microbatch.
    latency
        (2S, K) float64: transfer time from position q-1 to q.
    entry, kind
        (m,) int64: the microbatch that enters as the k-th, and its kind. :meth:`enter` changes them.
    host
        (2S,) int64: the rank of a position.
    static, limit
        (p,) float64. The limit includes the tolerance for rounding.
    fuse
        (p, chunks) bool: chunks whose backward is always the fused B.
    is_ample
        (p,) bool: the rank has memory for the forwards of all microbatches at once.
    microbatches
        Their number m.
    """

    position: IntArray
    duration: FloatArray
    delta: FloatArray
    latency: FloatArray
    entry: IntArray
    kind: IntArray
    host: IntArray
    static: FloatArray
    limit: FloatArray
    fuse: BoolArray
    is_ample: BoolArray
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
        count = np.bincount(self.kind, minlength=self.kinds)
        by_letter = self.duration.reshape(self.pp_degree, self.chunks, 4, self.kinds)
        forward, inputs, weights, fused = np.moveaxis(by_letter, 2, 0)
        split = inputs + weights
        backward = np.minimum(fused, split) if least else np.where(self.fuse[:, :, None], fused, split)
        loads: FloatArray = (forward + backward).sum(axis=1) @ count
        return loads

    def loads_by_kind(self) -> FloatArray:
        """Least time that one microbatch of every kind takes on every rank, (p, K)."""
        by_letter = self.duration.reshape(self.pp_degree, self.chunks, 4, self.kinds)
        forward, inputs, weights, fused = np.moveaxis(by_letter, 2, 0)
        loads: FloatArray = (forward + np.minimum(fused, inputs + weights)).sum(axis=1)
        return loads

    @property
    def kinds(self) -> int:
        """Number of kinds of microbatches K."""
        return int(self.duration.shape[2])

    def enter(self, entry: IntArray, kind_of: IntArray) -> None:
        """Let the microbatches enter in another order (m,); ``kind_of`` (m,) is the problem's."""
        self.entry[:] = entry
        self.kind[:] = kind_of[entry]


@compiled_leaf
def swap(tables: Tables, one: int, other: int) -> None:  # pragma: no cover - compiled
    """Swap two places in the order of entry."""
    tables.entry[one], tables.entry[other] = tables.entry[other], tables.entry[one]
    tables.kind[one], tables.kind[other] = tables.kind[other], tables.kind[one]


def make_tables(problem: Problem, fuse: BoolArray | None = None, entry: IntArray | None = None) -> Tables:
    """Tables of a problem.

    Parameters
    ----------
    fuse
        (S,) marks stages that always use B (default: none).
    entry
        (m,) the microbatch that enters as the k-th (default: ascending).
    """
    arrays, n = problem.arrays, problem.n_stages
    stages = np.array(problem.placement.stages_of, dtype=np.int64)
    p, chunks = stages.shape
    position = np.full((p, chunks, 4), NO_POSITION, dtype=np.int64)
    position[:, :, F] = stages
    position[:, :, I] = position[:, :, B] = 2 * n - 1 - stages
    slack = SEARCH_MEMORY * np.where(np.isfinite(arrays.limit), np.abs(arrays.limit), 0.0)
    fused = np.zeros(n, dtype=np.bool_) if fuse is None else fuse
    entered = np.arange(problem.microbatches) if entry is None else entry.astype(np.int64)
    none = np.zeros((1, arrays.kinds))
    return Tables(
        position=position.reshape(p, 4 * chunks),
        duration=_by_code(arrays.duration, stages),
        delta=_by_code(arrays.delta, stages),
        # Position 0 has no input. Position S, the backward of the last stage, follows the F of the same
        # stage, so no transfer precedes it. Backwards use the forward latencies in reverse.
        latency=np.concatenate([none, arrays.latency, none, arrays.latency[::-1]]),
        entry=entered,
        kind=arrays.kind_of[entered].astype(np.int64),
        host=np.concatenate([arrays.rank_of, arrays.rank_of[::-1]]).astype(np.int64),
        static=arrays.static.copy(),
        limit=arrays.limit + slack,
        fuse=fused[stages],
        is_ample=arrays.static + arrays.delta[F, stages].sum(axis=1) @ arrays.count <= arrays.limit,
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
    """(4, S, K) by letter and stage to (p, 4 * chunks, K) by rank and code."""
    p, chunks = stages.shape
    return np.ascontiguousarray(values[:, stages].transpose(1, 2, 0, 3).reshape(p, 4 * chunks, -1))
