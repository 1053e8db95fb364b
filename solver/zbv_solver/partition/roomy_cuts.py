"""Cuts whose ranks have room for several microbatches at once.

If only one microbatch fits, a plan is possible but slow, because ranks wait for each other. The best number
of microbatches is not known in advance. So the most even cut is computed for several numbers, and constructed
orders show which one is best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import Boundaries, CutSpace

IN_FLIGHT = (0.15, 0.25, 1 / 3, 0.5, 2 / 3, 1.0)
"""Microbatches that a rank has room for on all its stages, in multiples of p: 1F1B and ZB-V hold 1, V-Half
1/2 and V-Min 1/3."""
FIRST_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the model's work, from its beginning, that are recomputed in any case."""
NEVER = 1e12
"""A multiple of a part's activations for which no rank has room."""


def roomy_cuts(
    space: CutSpace, start: Boundaries, least: float = 0.0
) -> Iterator[tuple[Boundaries, tuple[bool, ...]]]:
    """Boundaries and recomputed stages of the most even cuts with room for several microbatches.

    In some of them, all stages have room for the same number of microbatches. In others, early stages have
    room for more than late ones, because they hold an activation longer (Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory", section 3: the lifespan of a stage). In others again, early stages
    are recomputed, and all have room for one microbatch.

    ``least`` is a known lower bound of the worst load of every cut that fits.
    """
    if not np.isfinite(space.tables.room).all():
        return
    known: list[tuple[FloatArray, float]] = []
    for times in rooms(space):
        # A cut with this much room has room for less, too.
        least_with_room = max([least, *(worst for less, worst in known if (less <= times).all())])
        if least_with_room == np.inf:
            continue
        found = _most_even(with_room(space, times), start, least_with_room)
        known.append((times, np.inf if found is None else found.worst))
        if found is not None:
            yield found.bounds, found.recompute


def rooms(space: CutSpace) -> Iterator[FloatArray]:
    """Multiples of every part's activations to make room for: (2, n), plain and recomputed."""
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
    """The space with each part's activation memory multiplied by ``times`` (2, n), plain and recomputed."""
    tables = space.tables
    sums = tables.sums.copy()
    # Row 3 holds activations and static memory. Only activations are multiplied.
    sums[:, :, 3, 1:] += np.cumsum(np.diff(tables.held) * (times - 1), axis=2)
    return replace(space, tables=replace(tables, sums=sums))


class _Roomy(NamedTuple):
    """A cut, and a lower bound of the worst load of every cut with this much room."""

    bounds: Boundaries
    recompute: tuple[bool, ...]
    worst: float


def _most_even(space: CutSpace, start: Boundaries, least: float) -> _Roomy | None:
    """Under loop the bounds stay as they are: they were settled, and will be moved."""
    if space.placement.kind != "loop":
        balanced = balanced_cut(space, start, least)
        if balanced is None:
            return None
        return _Roomy(space.bounds_of(balanced.cut), balanced.cut.recompute, balanced.worst)
    recompute = space.fitting(start)
    return None if recompute is None else _Roomy(start, recompute, least)
