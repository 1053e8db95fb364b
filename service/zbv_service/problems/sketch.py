"""A quick plan of layers: one placement, and the best of the cuts that need no search.

A full search compares cuts, moves their bounds and plans every placement. A form needs an approximate result
while its user is typing.
"""

from __future__ import annotations

import time
from dataclasses import replace

from zbv_solver.construct.baselines import without_limit
from zbv_solver.partition.cut_space import Boundaries, CutSpace, CutTables
from zbv_solver.partition.first_cuts import (
    EVEN,
    HISTOGRAM,
    even_cut,
    fitting_starts,
    histogram_cut,
    level_cut,
    roomy_cuts,
)
from zbv_solver.partition.joint_search import Judge
from zbv_solver.plans.plan import Baseline, Plan
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import Search, search

SIMPLE_SHARE = 0.5
"""The time for planning each simple cut, as a share of the time for the best cut."""


def sketch(problem: LayeredProblem, seconds: float) -> Plan:
    """A plan on the first placement with a cut that fits; its baselines include simple cuts.

    Parameters
    ----------
    seconds
        Time limit of comparing cuts, and again of the plan's search. It only matters for large problems: a
        hundred layers on sixteen ranks take some tenths of a second.

    Raises
    ------
    InfeasibleMemory
        No cut fits.
    """
    tables = CutTables.of(problem)
    for placement in problem.placements:
        space = CutSpace(problem, placement, tables)
        starts, _ = fitting_starts(space, level_cut(space))
        if starts:
            return _planned(space, starts, seconds)
    # No cut fits: the search raises the error, which says what the smallest cut needs.
    return search(problem, SearchOptions("quick", time_limit=seconds))


def _planned(space: CutSpace, starts: dict[str, Cut], seconds: float) -> Plan:
    best = _best(space, starts, seconds)
    plan = search(_stages(space, best), SearchOptions("quick", time_limit=seconds))
    simple = []
    for name, bounds in ((EVEN, even_cut(space)), (HISTOGRAM, histogram_cut(space))):
        same = plan if starts.get(name) == best else None
        simple.append(_baseline(space, name, same, bounds, SIMPLE_SHARE * seconds))
    return replace(plan, baselines=(*plan.baselines, *simple))


def _best(space: CutSpace, starts: dict[str, Cut], seconds: float) -> Cut:
    """The most promising start. While there is time, cuts with some memory to spare are considered too."""
    judge, until = Judge(space), time.monotonic() + seconds
    known = {start: judge.value(start) for start in starts.values()}
    for start in roomy_cuts(space, space.bounds_of(next(iter(known)))):
        known.setdefault(start, judge.value(start))
        if time.monotonic() > until:
            break
    return min(known, key=known.__getitem__)


def _baseline(space: CutSpace, name: str, plan: Plan | None, bounds: Boundaries, seconds: float) -> Baseline:
    """The plan of a simple cut, without the memory limit if the cut does not fit."""
    cut = space.fitting(bounds)
    if plan is None:
        problem = _stages(space, cut or space.cut(bounds, (False,) * space.n_stages))
        options = SearchOptions("quick", time_limit=seconds)
        # Without a comparison with classical schedules, which nobody would see, and which takes the longest.
        searching = Search(without_limit(problem) if cut is None else problem, options)
        searching.run()
        plan = searching.plan()
    found = plan.metrics
    return Baseline(name, found.span, found.makespan, found.bubble_rate, found.peak_memory, cut is not None)


def _stages(space: CutSpace, cut: Cut) -> Problem:
    return space.problem.cut_into(space.placement, cut)
