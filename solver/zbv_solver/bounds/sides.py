"""The two sides of a schedule, as one kind of thing.

Read forwards, a *cell* (a microbatch on a stage) has a *first* action F, which takes memory, a *second*,
the backward, which gives some back, and a *post*, W, which gives back the rest. Read backwards, from the end
of the window, the first is the backward, preceded by a *pre*, W, and the second, which gives everything
back, is F. Either way the firsts pass through the stages upwards and the seconds downwards; so what bounds
heads on one side bounds tails on the other.

Where fusing pays, the backward may be I or B. Its length is then the shorter of both, and its cell's rest
is what the cheaper way leaves; read backwards, that rest need not precede it. Where fusing never pays, a B
may be replaced with I and W without loss, and there is no B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.bounds.heads import FREE_POST, FREE_SECOND, POST, SECOND, sweep
from zbv_solver.problem.numeric import AMOUNT_ROUNDING, MEMORY_TOLERANCE, OPTIMAL_GAP, integer_scale
from zbv_solver.problem.problem import B, F, I, Problem, W

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

MOST_UNITS = 1 << 30
"""Of a common unit of memory, the largest amount may have this many."""
FAR = 1 << 40
"""A reach beyond all microbatches."""


@dataclass(frozen=True, eq=False)
class Side:
    """A problem read in one direction; c chunks per rank, outermost first.

    Attributes
    ----------
    work, hold
        (p, 4, c): durations and memory, rows as named in :mod:`.heads`.
    gap
        (S,) transfer between a stage and the next.
    stages
        (p, c).
    room
        (p,) memory that cells may hold; inf where unlimited.
    reach
        (p, c) cells that chunks 0 … c may hold while one cell of every further chunk still fits.
    price
        (p,) least work that gives back one unit of memory.
    own
        (p, c) 1 where every cell has an own W.
    """

    work: FloatArray
    hold: FloatArray
    gap: FloatArray
    stages: IntArray
    room: FloatArray
    reach: IntArray
    price: FloatArray
    own: IntArray

    def heads(self, origin: int, everywhere: bool, m: int) -> FloatArray:
        """Heads (3, S, m) of firsts, seconds and cell ends: Lemmas 10 to 17, see :func:`.heads.sweep`."""
        return sweep(
            self.work,
            self.hold,
            self.gap,
            self.stages,
            self.room,
            self.reach,
            self.price,
            self.own,
            origin,
            everywhere,
            m,
        )


def sides(problem: Problem) -> tuple[Side, Side]:
    """The problem read forwards and backwards.

    Lemma 5 for the lengths, 8 for reading backwards, 9 for ``room``, 12 for ``reach`` and 14 for ``price``.
    """
    arrays = problem.arrays
    stages = np.array(problem.placement.stages_of, dtype=np.int64)
    fusable = may_fuse(problem)
    forward, inputs, weights, fused = arrays.duration
    backward = np.where(fusable, np.minimum(inputs, fused), inputs)
    rest = np.where(fusable, np.minimum(inputs + weights, fused), inputs + weights) - backward
    held = arrays.delta[F]
    by_input = np.clip(-arrays.delta[I], 0.0, held)
    zeros = np.zeros(problem.n_stages)
    gap = np.append(arrays.transfer, 0.0)
    room = _room(problem) * (1 + AMOUNT_ROUNDING)
    reach = _reach(room, held[stages])
    own = np.where(fusable, 0, 1)[stages]

    def side(work: tuple[FloatArray, ...], hold: tuple[FloatArray, ...]) -> Side:
        work_of, hold_of = (
            np.ascontiguousarray(np.stack(rows)[:, stages].swapaxes(0, 1)) for rows in (work, hold)
        )
        return Side(work_of, hold_of, gap, stages, room, reach, _price(work_of, hold_of), own)

    return (
        side((forward, backward, zeros, rest), (held, zeros, by_input, held - by_input)),
        side((backward, forward, rest, zeros), (held, held - by_input, held, zeros)),
    )


def may_fuse(problem: Problem) -> BoolArray:
    """Where B can pay (S,): it is cheaper than I and W, or I would grow memory under a limit. Lemma 2."""
    arrays = problem.arrays
    cheaper: BoolArray = arrays.duration[B] < arrays.duration[I] + arrays.duration[W]
    grows: BoolArray = (arrays.delta[I] > 0) & (problem.memory.limit is not None)
    return np.logical_or(cheaper, grows)


def _room(problem: Problem) -> FloatArray:
    """Limit less static memory (p,), as checks tolerate it, rounded down to what cells can add up to."""
    arrays = problem.arrays
    room = np.full(problem.pp_degree, np.inf)
    for rank, stages in enumerate(problem.placement.stages_of):
        limit, static = float(arrays.limit[rank]), float(arrays.static[rank])
        if not math.isfinite(limit):
            continue
        space = limit - static + 2 * MEMORY_TOLERANCE * max(limit, static)
        scale = integer_scale(arrays.delta[:3, list(stages)].ravel().tolist(), MOST_UNITS)
        room[rank] = space if scale is None else math.floor(space * scale) / scale
    return room


def _reach(room: FloatArray, held: FloatArray) -> IntArray:
    """See :class:`Side`; at least 1, as any feasible limit allows."""
    upto = np.cumsum(held, axis=1)
    space = room[:, None] - (upto[:, -1:] - upto)
    reach = np.full(held.shape, FAR, dtype=np.int64)
    bounded = (upto > 0) & (space < upto * FAR)
    reach[bounded] = np.floor(space[bounded] / upto[bounded] * (1 + OPTIMAL_GAP))
    return np.maximum(reach, 1)


def _price(work: FloatArray, hold: FloatArray) -> FloatArray:
    """See :class:`Side`."""
    cheapest = np.full(len(work), np.inf)
    for effort, free in ((SECOND, FREE_SECOND), (POST, FREE_POST)):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(hold[:, free] > 0, work[:, effort] / hold[:, free], np.inf)
        cheapest = np.minimum(cheapest, ratio.min(axis=1))
    return np.where(np.isfinite(cheapest), cheapest, 0.0)
