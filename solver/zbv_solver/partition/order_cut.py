"""A good cut of layers for one fixed order, by a local search: for schedules that plans are compared with.

Nothing is proved here. The result is never worse than the cuts that the search begins with, as far as they
fit the memory limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from zbv_solver.partition.cut_space import Boundaries, CutSpace
from zbv_solver.partition.cut_tables import CutTables
from zbv_solver.partition.descent import CutDescent
from zbv_solver.partition.fixed_order import FixedOrder
from zbv_solver.partition.runs import WHOLE, Runs
from zbv_solver.partition.simple_cuts import level_cut
from zbv_solver.partition.starts import fitting_starts
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import SEARCH_MEMORY, exceeds
from zbv_solver.problem.problem import objective_value
from zbv_solver.timing.start_times import evaluate

_Start = tuple[Boundaries, tuple[bool, ...]]
"""Boundaries in parts, and which stages are recomputed."""
ACTIONS = 5_000_000
"""Actions that the search for one order may time: some tenths of a second."""


def cut_for_order(
    problem: LayeredProblem, orders: Orders, also: Sequence[Cut] = (), actions: int = ACTIONS
) -> Cut:
    """The best cut of layers that was found for an order, on the problem's only placement.

    If no cut is found that fits the memory limit, the cut is the best one without it, and nothing is
    recomputed.

    Parameters
    ----------
    also
        Cuts that the result must not be worse than.
    """
    found = _searched(problem, orders, also, actions)
    found = found or _searched(replace(problem, limit=None), orders, also, actions)
    if found is None:
        raise RuntimeError("no cut was timed; this is a bug in zbv, please report it.")
    return found


def _searched(problem: LayeredProblem, orders: Orders, also: Sequence[Cut], actions: int) -> Cut | None:
    """The best cut that fits; None if none was found."""
    (placement,) = problem.placements
    space = CutSpace(problem, placement, CutTables.of(problem))
    starts = list(dict.fromkeys(_starts(space, also)))
    if not problem.has_equal_ranks:
        return _best_of(space, orders, starts)
    runs = Runs.of(space)
    if runs.allow_none:
        return _best_of(space, orders, starts)
    order = FixedOrder.of(problem.cut_into(placement, space.cut(*starts[0])), orders)
    can_choose = problem.limit is not None and problem.model.can_recompute
    local = CutDescent(runs, order, actions, 0, None if can_choose else (0,) * space.n_stages)
    for bounds, recompute in starts:
        if (allowed := runs.repaired(bounds)) is not None:
            local.consider((allowed, tuple(WHOLE * again for again in recompute)))
    first = local.best or local.closest
    if first is not None:
        local.run(first)
    if local.best is None:
        return None
    bounds, chosen = local.best
    return space.cut(bounds, tuple(map(bool, chosen)))


def _starts(space: CutSpace, also: Sequence[Cut]) -> Iterator[_Start]:
    """The given cuts and the usual ones, with those stages recomputed that need to be."""
    plain = (False,) * space.n_stages
    level = level_cut(space)
    yield level, plain
    if space.problem.limit is not None and space.tables.variants > 1:
        yield level, (True,) * space.n_stages
    for cut in also:
        bounds = space.bounds_of(cut)
        if space.allows(bounds) and space.cut(bounds, cut.recompute) == cut:
            yield bounds, cut.recompute
    yield from fitting_starts(space, level)[0].values()


def _best_of(
    space: CutSpace, orders: Orders, choices: Iterable[tuple[Boundaries, tuple[bool, ...]]]
) -> Cut | None:
    """The best of some cuts that fit, for ranks that differ."""
    limits, best, least = space.problem.limit, None, float("inf")
    for choice in choices:
        cut = space.cut(*choice)
        timing = evaluate(replace(space.problem, limit=None).cut_into(space.placement, cut), orders)
        peaks = zip(timing.peak_memory, limits or (), strict=False)
        value = objective_value(space.problem.objective, timing)
        if value < least and not any(exceeds(peak, limit, SEARCH_MEMORY) for peak, limit in peaks):
            best, least = cut, value
    return best
