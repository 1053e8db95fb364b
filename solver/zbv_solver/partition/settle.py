"""Cuts with even loads on any placement, by annealing the boundaries.

For the loop placement there is no exact method: a rank's stages are spread over the model, so ranks cannot be
served one after another as in :mod:`.balance`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray, compiled, compiled_leaf
from zbv_solver.partition.cut_space import EXCESS, LOAD, MOST_TRIED, Boundaries, CutSpace, CutTables
from zbv_solver.problem.numeric import ROUNDING

MOVES_PER_STAGE, MOST_SHIFTS = 2_000, 200_000_000
"""Moves per stage, and the most boundaries that all moves together may shift, which bounds the time."""
WARMEST, COLDEST = (0.3, 1.0), 1e-4
"""Temperatures, in units of the energy of a rank with mean load, or of one that needs twice its room."""


class _Settling(NamedTuple):
    """What annealing works with: the mode, the placement, the ranges of boundaries, and units.

    ``unit`` (p,) measures every rank's excess; ``stages`` (p, chunks) and ``rank_of`` (S,) are the placement;
    ``lower`` and ``upper`` (S+1,) are the ranges of boundaries; ``least`` is the fewest parts of a stage;
    ``mean`` is the mean load of a rank. ``costs`` (variants, chunks, 4) is space for the costs of a rank's
    stages: F, backward, memory and workspace, plain and recomputed.
    """

    mode: int
    unit: FloatArray
    stages: IntArray
    rank_of: IntArray
    lower: IntArray
    upper: IntArray
    least: int
    mean: float
    costs: FloatArray


def settled_cut(space: CutSpace, start: Boundaries, seed: int = 0) -> Boundaries:
    """Boundaries with even loads that fit the memory limit, or exceed it by as little as was found."""
    if space.fitting(start) is None:
        start = _annealed(space, start, EXCESS, seed)
        if space.fitting(start) is None:
            return start
    return _annealed(space, start, LOAD, seed)


def _annealed(space: CutSpace, start: Boundaries, mode: int, seed: int) -> Boundaries:
    """Anneal from a start. In mode LOAD the start must fit, and no cut that does not fit is accepted."""
    tables = space.tables
    lower, upper = space.ranges
    mean = float(tables.cheapest[-1]) / float(tables.speeds.sum()) or 1.0
    # The excess of a rank with almost no room is measured against the memory of all layers.
    whole = float(tables.sums[0, 0, 3, -1])
    unit = np.maximum(np.abs(tables.room), whole * ROUNDING if whole > 0 else 1.0)
    settling = _Settling(
        mode,
        unit,
        np.array(space.placement.stages_of),
        np.array(space.placement.rank_of),
        lower,
        upper,
        space.least,
        mean,
        np.empty((tables.variants, space.placement.chunks, 4)),
    )
    moves = min(MOVES_PER_STAGE * space.n_stages, MOST_SHIFTS // space.n_stages)
    bounds = _settle(tables, settling, np.array(start), moves, seed)
    return tuple(map(int, bounds))


@compiled_leaf
def _energy(
    tables: CutTables, settling: _Settling, bounds: IntArray, rank: int
) -> float:  # pragma: no cover - compiled
    """A rank's share of the energy, with the best choice of recomputed stages.

    In mode LOAD it is a high power of the load, so that the most loaded ranks govern the sum. In mode EXCESS
    it is the memory beyond the rank's room, so that the sum is 0 when all ranks fit.
    """
    kind, variants = tables.kind_of[rank], tables.variants
    sums, workspace, room = tables.sums[kind], tables.workspace[kind], tables.room[rank]
    stages, unit, costs = settling.stages, settling.unit, settling.costs
    chunks = stages.shape[1]
    for chunk in range(chunks):
        begin, end = bounds[stages[rank, chunk]], bounds[stages[rank, chunk] + 1]
        for at in range(variants):
            costs[at, chunk, 0] = sums[at, 0, end] - sums[at, 0, begin]
            split, fused = sums[at, 1, end] - sums[at, 1, begin], sums[at, 2, end] - sums[at, 2, begin]
            costs[at, chunk, 1] = min(split, fused)
            costs[at, chunk, 2] = sums[at, 3, end] - sums[at, 3, begin]
            costs[at, chunk, 3] = workspace[at, begin, end]
    best, excess = np.inf, np.inf
    tries_all = chunks <= MOST_TRIED
    choices = 1
    if variants > 1:
        choices = 1 << chunks if tries_all else chunks + 1
    for choice in range(choices):
        load, held, largest = 0.0, 0.0, 0.0
        for chunk in range(chunks):
            at = (choice >> chunk) & 1 if tries_all else int(chunk < choice)
            load += costs[at, chunk, 0]
            load += costs[at, chunk, 1]
            held += costs[at, chunk, 2]
            largest = max(largest, costs[at, chunk, 3])
        if held + largest <= room:
            best = min(best, load)
        excess = min(excess, held + largest - room)
    if settling.mode == EXCESS:
        return max(0.0, excess) / float(unit[rank])
    return (best / settling.mean) ** 8


@compiled
def _settle(
    tables: CutTables, settling: _Settling, start: IntArray, moves: int, seed: int
) -> IntArray:  # pragma: no cover - compiled
    """The best boundaries that annealing found."""
    rank_of, lower, upper, least = settling.rank_of, settling.lower, settling.upper, settling.least
    warmest = WARMEST[settling.mode]
    np.random.seed(seed)
    bounds, best = start.copy(), start.copy()
    p = len(tables.room)
    energy, fresh = np.empty(p), np.empty(p)
    for rank in range(p):
        energy[rank] = _energy(tables, settling, bounds, rank)
    total = energy.sum()
    lowest = total
    for move in range(moves):
        # A part moves from one stage to another: every boundary between them shifts by one.
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
        for bound in range(low + 1, high + 1):
            bounds[bound] += step
        fresh[:] = energy
        # Some ranks would be computed twice.
        if high - low >= p:
            for rank in range(p):
                fresh[rank] = _energy(tables, settling, bounds, rank)
        else:
            for stage in range(low, high + 1):
                rank = rank_of[stage]
                fresh[rank] = _energy(tables, settling, bounds, rank)
        changed = fresh.sum() - total
        temperature = warmest * (COLDEST / warmest) ** (move / moves)
        if changed <= 0 or np.random.random() < np.exp(-changed / temperature):
            energy, fresh, total = fresh, energy, total + changed
            if total < lowest * (1 - ROUNDING):
                lowest = total
                best = bounds.copy()
                if lowest <= 0:
                    break
        else:
            for bound in range(low + 1, high + 1):
                bounds[bound] -= step
    return best
