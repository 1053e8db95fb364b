"""First cuts for the search: simple ones, and the one with the most even load."""

from __future__ import annotations

from dataclasses import replace

from zbv_solver.partition.balance import Balanced, balanced_cut
from zbv_solver.partition.cut_space import Boundaries, CutSpace
from zbv_solver.partition.settle import settled_cut
from zbv_solver.partition.simple_cuts import even_cut, histogram_cut

EVEN, HISTOGRAM = "even-cut", "histogram-cut"

Start = tuple[Boundaries, tuple[bool, ...]]
"""Boundaries and recomputed stages."""


def even_bound(space: CutSpace, level: Boundaries) -> Balanced | None:
    """The most even cut within the verifier's tolerance; its load bounds that of every cut with a plan."""
    tables = replace(space.tables, room=space.tables.most_room)
    return balanced_cut(replace(space, tables=tables), level)


def fitting_starts(
    space: CutSpace, level: Boundaries, seed: int = 0
) -> tuple[dict[str, Start], float | None]:
    """Cuts that fit, by name, the most even first; and a lower bound on the worst load of cuts that fit.

    The bound is 0 for the loop placement, where none is known, and None if it is proved that no cut fits.
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
            balanced = balanced_cut(space, level)  # the other one fits only within the verifier's tolerance
        if balanced is not None:
            found["balanced"] = space.bounds_of(balanced.cut), balanced.cut.recompute
    for name, bounds in simple.items():
        recompute = space.fitting(bounds)
        if recompute is not None:
            found[name] = bounds, recompute
    return found, worst
