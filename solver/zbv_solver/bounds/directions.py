"""The forward and the time-reversed problem, in one representation.

A *cell* is a microbatch on a stage. In either direction of time its operations pass the stages twice: an
*up operation* passes them in ascending order and allocates memory, then a *down operation* passes them in
descending order and releases memory. Forwards, up is F, down is the backward, and W is a *rest* after it that
releases what is left. In reverse, from the end of the window, up is the backward, with W as a rest before it,
and down is F, which releases everything. So what bounds heads in one direction bounds tails in the other.

Where fusing pays, the backward may be I or B. Its length is then the shorter of both, and the rest is what
the cheaper way leaves; in reverse, that rest need not come before it. Where fusing never pays, a B can be
replaced by I and W without loss, so there is none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import BoolArray, FloatArray, IntArray, compiled_leaf
from zbv_solver.problem.numeric import AMOUNT_ROUNDING, MEMORY_TOLERANCE, OPTIMAL_GAP, integer_scale
from zbv_solver.problem.problem import B, F, I, Problem, W

UP, DOWN, REST_BEFORE, REST_AFTER = range(4)
"""Rows of ``work``; the first three are also those of required counts."""
HELD, HELD_BY_REST, FREED_BY_DOWN, FREED_BY_REST = range(4)
"""Rows of ``memory``."""

MOST_UNITS = 1 << 30
"""Of a common unit of memory, the largest amount may have this many."""
UNLIMITED = 1 << 40
"""A number of cells beyond all microbatches."""


class Direction(NamedTuple):
    """A problem in one direction of time, as kernels read it; c chunks per rank, outermost first."""

    work: FloatArray
    memory: FloatArray
    """(p, 4, c): durations and amounts, rows UP, DOWN, … and HELD, …."""
    latency: FloatArray
    """(S,) transfer time between a stage and the next."""
    stages: IntArray
    """(p, c)."""
    capacity: FloatArray
    """(p,) memory that cells may hold; inf where unlimited."""
    in_flight: IntArray
    """(p, c) cells that each of the chunks 0 … c may hold while one cell of every further chunk still
    fits."""
    work_per_memory: FloatArray
    """(p,) least work that releases one unit of memory."""
    is_split: IntArray
    """(p, c) 1 where every cell has a separate W."""


def directions(problem: Problem) -> tuple[Direction, Direction]:
    """The forward and the time-reversed problem.

    Lemma 5 for the lengths, 8 for the reversal, 9 for ``capacity``, 12 for ``in_flight``, and 14 for
    ``work_per_memory``.
    """
    costs = problem.arrays.of_equal()
    stages = np.array(problem.placement.stages_of, dtype=np.int64)
    fusable = may_fuse(problem)
    forward, inputs, weights, fused = costs.duration
    backward = np.where(fusable, np.minimum(inputs, fused), inputs)
    rest = np.where(fusable, np.minimum(inputs + weights, fused), inputs + weights) - backward
    held = costs.delta[F]
    # This is g of Lemma 5: what a virtual backward releases.
    by_input = np.clip(-costs.delta[I], 0.0, held)
    zeros = np.zeros(problem.n_stages)
    latency = np.append(costs.latency, 0.0)
    capacity = _capacity(problem) * (1 + AMOUNT_ROUNDING)
    in_flight = _in_flight(capacity, held[stages])
    is_split = np.where(fusable, 0, 1)[stages]

    def direction(work: tuple[FloatArray, ...], memory: tuple[FloatArray, ...]) -> Direction:
        work_of, memory_of = (
            np.ascontiguousarray(np.stack(rows)[:, stages].swapaxes(0, 1)) for rows in (work, memory)
        )
        cheapest = _work_per_memory(work_of, memory_of)
        return Direction(work_of, memory_of, latency, stages, capacity, in_flight, cheapest, is_split)

    return (
        # Rows as the constants above list them. In reverse (Lemma 8), the backward is the up operation; its
        # rest allocates held - by_input before it, and F releases everything.
        direction((forward, backward, zeros, rest), (held, zeros, by_input, held - by_input)),
        direction((backward, forward, rest, zeros), (held, held - by_input, held, zeros)),
    )


def _capacity(problem: Problem) -> FloatArray:
    """Limit less static memory (p,), as checks tolerate it, rounded down to what cells can add up to."""
    arrays = problem.arrays
    delta = arrays.of_equal().delta
    capacity = np.full(problem.pp_degree, np.inf)
    for rank, stages in enumerate(problem.placement.stages_of):
        limit, static = float(arrays.limit[rank]), float(arrays.static[rank])
        if not math.isfinite(limit):
            continue
        # Capacity must not be below what the verifier admits: Lemma 9.
        space = limit - static + 2 * MEMORY_TOLERANCE * max(limit, static)
        scale = integer_scale(delta[:3, list(stages)].ravel().tolist(), MOST_UNITS)
        capacity[rank] = space if scale is None else math.floor(space * scale) / scale
    return capacity


def _in_flight(capacity: FloatArray, held: FloatArray) -> IntArray:
    """See :class:`Direction`; at least 1, as any feasible limit allows."""
    upto = np.cumsum(held, axis=1)
    space = capacity[:, None] - (upto[:, -1:] - upto)
    cells = np.full(held.shape, UNLIMITED, dtype=np.int64)
    bounded = (upto > 0) & (space < upto * UNLIMITED)
    # Rounding up is safe: a larger in_flight claims less (Lemma 12).
    cells[bounded] = np.floor(space[bounded] / upto[bounded] * (1 + OPTIMAL_GAP))
    return np.maximum(cells, 1)


def _work_per_memory(work: FloatArray, memory: FloatArray) -> FloatArray:
    """See :class:`Direction`; 0 where nothing releases memory."""
    cheapest = np.full(len(work), np.inf)
    for operation, freed in ((DOWN, FREED_BY_DOWN), (REST_AFTER, FREED_BY_REST)):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(memory[:, freed] > 0, work[:, operation] / memory[:, freed], np.inf)
        cheapest = np.minimum(cheapest, ratio.min(axis=1))
    return np.where(np.isfinite(cheapest), cheapest, 0.0)


def is_cheaper_fused(problem: Problem) -> BoolArray:
    """Stages (S,) whose B takes less time than I and W for some microbatch: a part of Lemma 2."""
    duration = problem.arrays.duration
    cheaper: BoolArray = (duration[B] < duration[I] + duration[W]).any(axis=1)
    return cheaper


def may_fuse(problem: Problem) -> BoolArray:
    """Stages (S,) where B can pay: it is cheaper, or I would grow memory under a limit. Lemma 2."""
    grows: BoolArray = (problem.arrays.delta[I] > 0).any(axis=1) & (problem.memory.limit is not None)
    return np.logical_or(is_cheaper_fused(problem), grows)


@compiled_leaf
def knapsack(
    work: FloatArray,
    memory: FloatArray,
    free: float,
    ready: IntArray,
    ups: IntArray,
    rests: IntArray,
    scratch: FloatArray,
) -> float:  # pragma: no cover - compiled
    """Most work of up operations and rests that fits the free memory: Lemma 15 (c).

    The knapsack is fractional, so this is at least the true maximum. Per chunk there are at most ``rests``
    rests and min(``ready``, ``ups``) up operations, each with its rest. Where the up operation does more work
    per memory, it is packed together with its rest; otherwise rests are packed first. Either way a chunk's
    work is concave in its memory, so packing the densest piece of all chunks first is optimal.
    """
    chunks = work.shape[1]
    length, size = scratch[0], scratch[1]
    total, wanted, free = 0.0, 0.0, max(0.0, free)  # with less than none, no order exists: any bound is right
    for j in range(chunks):
        # Pieces 2j and 2j + 1 are the work and the memory of chunk j, the denser one first.
        n = min(ready[j], ups[j])
        every = max(n, rests[j])
        up, rest = work[UP, j], work[REST_BEFORE, j]
        small = memory[HELD_BY_REST, j]
        large = memory[HELD, j] - small
        # Compare the densities by products, because amounts may be 0. If the up operation is at least as
        # dense as a rest, so are both together (mediant).
        if up * small >= rest * large:
            length[2 * j], size[2 * j] = n * (up + rest), n * (small + large)
            length[2 * j + 1], size[2 * j + 1] = (every - n) * rest, (every - n) * small
        else:
            length[2 * j], size[2 * j] = every * rest, every * small
            length[2 * j + 1], size[2 * j + 1] = n * up, n * large
        total += length[2 * j] + length[2 * j + 1]
        wanted += size[2 * j] + size[2 * j + 1]
    if wanted <= free:
        return total
    total = 0.0
    for _ in range(2 * chunks):
        densest, best = -1.0, -1
        for i in range(2 * chunks):
            density = length[i] / size[i] if size[i] > 0 else np.inf
            if length[i] > 0 and density > densest:
                densest, best = density, i
        # A piece that does not fit whole is taken in part: the optimum of the fractional knapsack.
        if best < 0 or size[best] > free:
            return total + free * densest if best >= 0 else total
        total += length[best]
        free -= size[best]
        length[best] = 0.0
    return total
