"""Cuts whose ranks have room for several microbatches at once: what is recomputed to fill the pipeline.

That one microbatch fits makes a plan possible, not good: with one in flight, ranks wait for each other. How
many a rank should be able to hold is not known beforehand, so cuts with the most even load are made for
several answers, and the constructors tell which is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import Bounds, CutSpace
from zbv_solver.partition.cut_tables import FloatArray

IN_FLIGHT = (0.15, 0.25, 1 / 3, 0.5, 2 / 3, 1.0)
"""Microbatches on all stages of a rank, in multiples of p: 1F1B and ZB-V hold 1, V-Half 1/2, V-Min 1/3."""
FIRST_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the model's work, from its beginning, that are recomputed whatever room there is."""
NEVER = 1e12
"""Times a part's activations that no rank has room for."""


def roomy_cuts(space: CutSpace, start: Bounds) -> Iterator[tuple[Bounds, tuple[bool, ...]]]:
    """Bounds and recomputed stages of cuts with the most even load that leave room.

    Either every stage has room for as many microbatches, or an early one for more than a late one: an
    activation is held from a stage's forward until the backward comes back to it (Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory", section 3: the lifespan of a stage). Or the early ones are
    recomputed, and all have room for one.
    """
    if not np.isfinite(space.tables.room).all():
        return
    for times in rooms(space):
        found = _most_even(with_room(space, times), start)
        if found is not None:
            yield found


def rooms(space: CutSpace) -> Iterator[FloatArray]:
    """How many times each part's activations there is to be room for: (2, n), as it is and recomputed."""
    work = np.diff(space.tables.cheapest)
    done = (np.cumsum(work) - work / 2) / (float(work.sum()) or 1.0)
    for share in IN_FLIGHT:
        flat = max(1.0, share * space.placement.pp_degree) * np.ones((2, space.tables.n))
        yield flat
        yield np.maximum(1.0, 2 * flat * (1 - done))
    if space.tables.variants == 2:
        for share in FIRST_SHARES:
            yield np.array([np.where(done < share, NEVER, 1.0), np.ones(space.tables.n)])


def with_room(space: CutSpace, times: FloatArray) -> CutSpace:
    """The space with room for each part's activations so many times (2, n): as it is, and recomputed."""
    tables = space.tables
    sums = tables.sums.copy()
    sums[:, 3, 1:] += np.cumsum(np.diff(tables.held, axis=1) * (times - 1), axis=1)
    return replace(space, tables=replace(tables, sums=sums))


def _most_even(space: CutSpace, start: Bounds) -> tuple[Bounds, tuple[bool, ...]] | None:
    """Under loop the bounds stay as they are: they were settled, and will be moved."""
    if space.placement.kind != "loop":
        balanced = balanced_cut(space, start)
        return None if balanced is None else (space.bounds_of(balanced.cut), balanced.cut.recompute)
    recompute = space.fitting(start)
    return None if recompute is None else (start, recompute)
