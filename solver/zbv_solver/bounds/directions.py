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

from zbv_solver.bounds.fusing import may_fuse
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.problem.numeric import AMOUNT_ROUNDING, MEMORY_TOLERANCE, OPTIMAL_GAP, integer_scale
from zbv_solver.problem.problem import F, I, Problem

UP, DOWN, REST_BEFORE, REST_AFTER = range(4)
"""Rows of ``work``; the first three are also those of required counts."""
HELD, HELD_BY_REST, FREED_BY_DOWN, FREED_BY_REST = range(4)
"""Rows of ``memory``."""

MOST_UNITS = 1 << 30
"""Of a common unit of memory, the largest amount may have this many."""
UNLIMITED = 1 << 40
"""A number of cells beyond all microbatches."""


class Direction(NamedTuple):
    """A problem in one direction of time, as kernels read it; c chunks per rank, outermost first.

    Attributes
    ----------
    work, memory
        (p, 4, c): durations and amounts, rows UP, DOWN, … and HELD, ….
    latency
        (S,) transfer time between a stage and the next.
    stages
        (p, c).
    capacity
        (p,) memory that cells may hold; inf where unlimited.
    in_flight
        (p, c) cells that each of the chunks 0 … c may hold while one cell of every further chunk still fits.
    work_per_memory
        (p,) least work that releases one unit of memory.
    is_split
        (p, c) 1 where every cell has a separate W.
    """

    work: FloatArray
    memory: FloatArray
    latency: FloatArray
    stages: IntArray
    capacity: FloatArray
    in_flight: IntArray
    work_per_memory: FloatArray
    is_split: IntArray


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
