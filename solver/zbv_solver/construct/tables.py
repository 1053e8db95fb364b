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
from zbv_solver.kernels.jit import BoolArray, FloatArray, IntArray, compiled_leaf
from zbv_solver.problem.numeric import SEARCH_MEMORY
from zbv_solver.problem.problem import B, F, I, Problem, W

NO_POSITION = -1
"""Position of a W."""


class Tables(NamedTuple):
    """The numbers of a problem that kernels read; p ranks, c chunks per rank, K kinds of microbatches."""

    position: IntArray
    """(p, 4 * c) int64: the position of a code in the chain, ``NO_POSITION`` for W."""
    duration: FloatArray
    """(p, 4 * c, K) by kind of microbatch."""
    delta: FloatArray
    """(p, 4 * c, K): change of the rank's memory."""
    needs: FloatArray
    """(p, c, K): memory of an F on the chunk and on every later one."""
    latency: FloatArray
    """(2S, K): transfer time from position q-1 to q."""
    size: FloatArray
    """(K,): work of a microbatch over all stages."""
    pace: FloatArray
    """(K,): largest load of a microbatch on a rank, relative to the mean of all microbatches."""
    entry: IntArray
    """(m,) int64: the microbatch that enters as the k-th. :meth:`enter` changes it."""
    kind: IntArray
    """(m,) int64: the kind of that microbatch."""
    host: IntArray
    """(2S,) int64: the rank of a position."""
    static: FloatArray
    """(p,): memory that a rank always holds."""
    limit: FloatArray
    """(p,): its limit, with the tolerance for rounding."""
    fuse: BoolArray
    """(p, c): chunks whose backward is always the fused B."""
    is_ample: BoolArray
    """(p,): the rank has memory for the forwards of all microbatches at once."""
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
        forward, inputs, weights, fused = _by_letter(self.duration)
        split = inputs + weights
        backward = np.minimum(fused, split) if least else np.where(self.fuse[:, :, None], fused, split)
        count = np.bincount(self.kind, minlength=self.kinds)
        loads: FloatArray = (forward + backward).sum(axis=1) @ count
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
    duration, delta = _by_code(arrays.duration, stages), _by_code(arrays.delta, stages)
    needs = np.zeros((p, chunks, arrays.kinds))
    for chunk in range(chunks):
        for later in range(chunk, chunks):
            needs[:, chunk] += delta[:, 4 * later + F]
    return Tables(
        position=position.reshape(p, 4 * chunks),
        duration=duration,
        delta=delta,
        needs=needs,
        # Position 0 has no input. Position S, the backward of the last stage, follows the F of the same
        # stage, so no transfer precedes it. Backwards use the forward latencies in reverse.
        latency=np.concatenate([none, arrays.latency, none, arrays.latency[::-1]]),
        size=sizes_of_kinds(problem),
        pace=_paces(duration, arrays.count),
        entry=entered,
        kind=arrays.kind_of[entered].astype(np.int64),
        host=np.concatenate([arrays.rank_of, arrays.rank_of[::-1]]).astype(np.int64),
        static=arrays.static.copy(),
        limit=arrays.limit + slack,
        fuse=fused[stages],
        is_ample=arrays.static + arrays.delta[F, stages].sum(axis=1) @ arrays.count <= arrays.limit,
        microbatches=problem.microbatches,
    )


def sizes(problem: Problem) -> FloatArray:
    """The work of every microbatch over all stages, (m,)."""
    of_microbatch: FloatArray = sizes_of_kinds(problem)[problem.arrays.kind_of]
    return of_microbatch


def sizes_of_kinds(problem: Problem) -> FloatArray:
    """The work of a microbatch of every kind over all stages, (K,)."""
    duration = problem.arrays.duration
    work: FloatArray = (duration[F] + np.minimum(duration[B], duration[I] + duration[W])).sum(axis=0)
    return work


def mean_duration(problem: Problem) -> float:
    """The mean duration of F, I and W over all stages and kinds of microbatches: a unit for times."""
    return float(problem.arrays.duration[:3].mean())


def memory_for_activations(problem: Problem) -> FloatArray:
    """The limit of every rank less its static memory, (p,)."""
    arrays = problem.arrays
    return np.where(np.isfinite(arrays.limit), arrays.limit - arrays.static, np.inf)


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


def _paces(duration: FloatArray, count: IntArray) -> FloatArray:
    forward, inputs, weights, fused = _by_letter(duration)
    loads: FloatArray = (forward + np.minimum(fused, inputs + weights)).sum(axis=1).max(axis=0)
    mean = float(loads @ count) / int(count.sum())
    return loads / mean if mean > 0 else np.ones_like(loads)


def _by_letter(duration: FloatArray) -> FloatArray:
    """(p, 4 * c, K) by code to (4, p, c, K) by letter."""
    p, codes, kinds = duration.shape
    return np.moveaxis(duration.reshape(p, codes // 4, 4, kinds), 2, 0)


def _by_code(values: FloatArray, stages: IntArray) -> FloatArray:
    """(4, S, K) by letter and stage to (p, 4 * chunks, K) by rank and code."""
    p, chunks = stages.shape
    return np.ascontiguousarray(values[:, stages].transpose(1, 2, 0, 3).reshape(p, 4 * chunks, -1))
