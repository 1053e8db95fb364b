"""Cuts with even loads on any placement, by annealing the bounds: where no exact method is at hand.

Under the loop placement a rank's stages lie all over the model, so ranks cannot be served one after another
as in :mod:`.balance`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.kernels.jit import compiled
from zbv_solver.partition.cut_space import MOST_TRIED, Bounds, CutSpace
from zbv_solver.partition.cut_tables import FloatArray
from zbv_solver.problem.numeric import ROUNDING

IntArray = NDArray[Any]

MOVES_PER_STAGE, MOST_SHIFTS = 2_000, 200_000_000
"""Moves for every stage; and how many bounds all moves together may shift, which is what takes the time."""
LOAD, EXCESS = 0, 1
"""What is made small: the loads of the ranks, of cuts that fit; or what ranks need beyond their room."""
WARMEST, COLDEST = (0.3, 1.0), 1e-4
"""Temperatures, in units of the energy of a rank with mean load, or of one that needs twice its room."""


def settled_cut(space: CutSpace, start: Bounds, seed: int = 0) -> Bounds:
    """Bounds with even loads that fit the memory limit, or exceed it by as little as was found."""
    if space.fitting(start) is None:
        start = _annealed(space, start, EXCESS, seed)
        if space.fitting(start) is None:
            return start
    return _annealed(space, start, LOAD, seed)


def _annealed(space: CutSpace, start: Bounds, mode: int, seed: int) -> Bounds:
    """In mode LOAD the start has to fit; what does not is never gone to."""
    tables = space.tables
    lower, upper = space.ranges
    mean = float(tables.cheapest[-1]) / space.placement.pp_degree or 1.0
    # A rank without any room of its own is measured by what all layers hold.
    whole = float(tables.sums[0, 3, -1])
    unit = np.maximum(np.abs(tables.room), whole * ROUNDING if whole > 0 else 1.0)
    bounds = _settle(
        tables.sums,
        tables.workspace,
        tables.room,
        unit,
        tables.variants,
        mode,
        np.array(space.placement.stages_of),
        np.array(space.placement.rank_of),
        lower,
        upper,
        space.least,
        np.array(start),
        mean,
        WARMEST[mode],
        min(MOVES_PER_STAGE * space.n_stages, MOST_SHIFTS // space.n_stages),
        seed,
    )
    return tuple(map(int, bounds))


@compiled
def _energy(
    sums: FloatArray,
    workspace: FloatArray,
    room: FloatArray,
    unit: FloatArray,
    variants: int,
    mode: int,
    stages: IntArray,
    bounds: IntArray,
    rank: int,
    mean: float,
) -> float:  # pragma: no cover - compiled
    """A high power of a rank's load: the sum over ranks is governed by the most loaded ones.

    Or the share of its room that the rank needs beyond it: a sum that is 0 where all ranks fit. Of the
    choices of recomputed stages that :class:`CutSpace` knows, the best one counts.
    """
    chunks = stages.shape[1]
    best, excess = np.inf, np.inf
    tries_all = chunks <= MOST_TRIED
    choices = 1
    if variants > 1:
        choices = 1 << chunks if tries_all else chunks + 1
    for choice in range(choices):
        load, held, largest = 0.0, 0.0, 0.0
        for chunk in range(chunks):
            at = (choice >> chunk) & 1 if tries_all else int(chunk < choice)
            begin, end = bounds[stages[rank, chunk]], bounds[stages[rank, chunk] + 1]
            load += sums[at, 0, end] - sums[at, 0, begin]
            load += min(sums[at, 1, end] - sums[at, 1, begin], sums[at, 2, end] - sums[at, 2, begin])
            held += sums[at, 3, end] - sums[at, 3, begin]
            largest = max(largest, workspace[at, begin, end])
        if held + largest <= room[rank]:
            best = min(best, load)
        excess = min(excess, held + largest - room[rank])
    if mode == EXCESS:
        return max(0.0, excess) / float(unit[rank])
    return (best / mean) ** 8


@compiled
def _settle(
    sums: FloatArray,
    workspace: FloatArray,
    room: FloatArray,
    unit: FloatArray,
    variants: int,
    mode: int,
    stages: IntArray,
    rank_of: IntArray,
    lower: IntArray,
    upper: IntArray,
    least: int,
    start: IntArray,
    mean: float,
    warmest: float,
    moves: int,
    seed: int,
) -> IntArray:  # pragma: no cover - compiled
    np.random.seed(seed)
    bounds, best = start.copy(), start.copy()
    p = len(room)
    energy = np.empty(p)
    for rank in range(p):
        energy[rank] = _energy(sums, workspace, room, unit, variants, mode, stages, bounds, rank, mean)
    total = energy.sum()
    lowest = total
    for move in range(moves):
        # A part moves from one stage to another: every bound in between shifts by one.
        one, other = np.random.randint(0, len(rank_of)), np.random.randint(0, len(rank_of))
        if one == other:
            continue
        low, high = min(one, other), max(one, other)
        step = 1 if np.random.random() < 0.5 else -1
        possible = True
        for bound in range(low + 1, high + 1):
            value = bounds[bound] + step
            if value < lower[bound] or value > upper[bound]:
                possible = False
                break
        if step == 1:
            possible = possible and bounds[high + 1] - bounds[high] - 1 >= least
        else:
            possible = possible and bounds[low + 1] - bounds[low] - 1 >= least
        if not possible:
            continue
        bounds[low + 1 : high + 1] += step
        fresh = energy.copy()
        for stage in range(low, high + 1):
            rank = rank_of[stage]
            fresh[rank] = _energy(sums, workspace, room, unit, variants, mode, stages, bounds, rank, mean)
        changed = fresh.sum() - total
        temperature = warmest * (COLDEST / warmest) ** (move / moves)
        if changed <= 0 or np.random.random() < np.exp(-changed / temperature):
            energy, total = fresh, total + changed
            if total < lowest * (1 - ROUNDING):
                lowest = total
                best[:] = bounds
                if lowest <= 0:
                    break
        else:
            bounds[low + 1 : high + 1] -= step
    return best
