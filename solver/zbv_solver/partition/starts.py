"""Cuts to begin with: those that need no search, and fit."""

from __future__ import annotations

from dataclasses import replace

from zbv_solver.partition.balance import Balanced, balanced_cut
from zbv_solver.partition.cut_space import Bounds, CutSpace
from zbv_solver.partition.settle import settled_cut
from zbv_solver.partition.simple_cuts import even_cut, histogram_cut

EVEN, HISTOGRAM = "even-cut", "histogram-cut"

Start = tuple[Bounds, tuple[bool, ...]]
"""Bounds and recomputed stages."""


def even_bound(space: CutSpace, level: Bounds) -> Balanced | None:
    """The most even cut that the verifier would accept: a bound on the loads of every cut that has a plan."""
    tables = replace(space.tables, room=space.tables.most_room)
    return balanced_cut(replace(space, tables=tables), level)


def fitting_starts(space: CutSpace, level: Bounds, seed: int = 0) -> tuple[dict[str, Start], float | None]:
    """Cuts that fit, by name, the most even first; and a load that some rank has in every cut that fits.

    The load is 0 under the loop placement, where no least one is known, and None where it is proved that no
    cut fits.
    """
    found: dict[str, Start] = {}
    simple, worst = {"level": level, HISTOGRAM: histogram_cut(space), EVEN: even_cut(space)}, 0.0
    if space.placement.kind == "loop":
        simple = {"balanced": settled_cut(space, level, seed), **simple}
    else:
        balanced = even_bound(space, level)
        if balanced is None:
            return {}, None
        worst = balanced.worst
        if space.excess(space.bounds_of(balanced.cut), balanced.cut.recompute) > 0:
            balanced = balanced_cut(space, level)  # that one fits by what only the verifier tolerates
        if balanced is not None:
            found["balanced"] = space.bounds_of(balanced.cut), balanced.cut.recompute
    for name, bounds in simple.items():
        recompute = space.fitting(bounds)
        if recompute is not None:
            found[name] = bounds, recompute
    return found, worst
