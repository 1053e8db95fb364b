"""A plan of layers in a moment: one placement, and the best of the cuts that need no search.

A search tells cuts apart, moves their bounds and plans every placement. A form that is typed into wants to
know within a moment what about that will come to.
"""

from __future__ import annotations

import time
from dataclasses import replace

from zbv_solver.construct.baselines import without_limit
from zbv_solver.partition.cut_space import Bounds, CutSpace
from zbv_solver.partition.cut_tables import CutTables
from zbv_solver.partition.judge import Judge
from zbv_solver.partition.roomy_cuts import roomy_cuts
from zbv_solver.partition.simple_cuts import even_cut, histogram_cut, level_cut
from zbv_solver.partition.starts import EVEN, HISTOGRAM, Start, fitting_starts
from zbv_solver.plans.plan import Baseline, Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search import search

BESIDE_SHARE = 0.5
"""Of the plan's time, for each of the cuts that stand beside it."""


def sketch(problem: LayeredProblem, seconds: float) -> Plan:
    """A plan on the first placement that has a cut which fits, with simple cuts among its baselines.

    Parameters
    ----------
    seconds
        What the plan's search may take, and telling cuts apart before; caps for large problems, as all of
        it takes some tenths of a second where layers are a hundred and ranks sixteen.

    Raises
    ------
    InfeasibleMemory
        When no cut fits.
    """
    tables = CutTables.of(problem)
    for placement in problem.placements:
        space = CutSpace(problem, placement, tables)
        starts, _ = fitting_starts(space, level_cut(space))
        if starts:
            return _planned(space, starts, seconds)
    return search(problem, SearchOptions("quick", time_limit=seconds))  # says what the smallest cut needs


def _planned(space: CutSpace, starts: dict[str, Start], seconds: float) -> Plan:
    best = _best(space, starts, seconds)
    plan = _plan(space, best, seconds)
    beside = tuple(
        _baseline(
            space,
            name,
            plan if starts.get(name) == best else None,
            bounds,
            BESIDE_SHARE * seconds,
        )
        for name, bounds in _simple(space).items()
    )
    return replace(plan, baselines=(*plan.baselines, *beside))


def _best(space: CutSpace, starts: dict[str, Start], seconds: float) -> Start:
    """The most promising of the starts, and of cuts with room to spare while there is time."""
    judge, until = Judge(space), time.monotonic() + seconds
    known = {start: judge.value(*start) for start in starts.values()}
    for start in roomy_cuts(space, next(iter(known))[0]):
        known.setdefault(start, judge.value(*start))
        if time.monotonic() > until:
            break
    return min(known, key=known.__getitem__)


def _baseline(space: CutSpace, name: str, plan: Plan | None, bounds: Bounds, seconds: float) -> Baseline:
    """A simple cut's plan; without the limit where it does not fit."""
    recompute = space.fitting(bounds)
    if plan is None:
        plan = _plan(space, (bounds, recompute or (False,) * space.n_stages), seconds, recompute is not None)
    found = plan.metrics
    return Baseline(
        name, found.span, found.makespan, found.bubble_rate, found.peak_memory, recompute is not None
    )


def _plan(space: CutSpace, start: Start, seconds: float, is_limited: bool = True) -> Plan:
    problem = space.problem.cut_into(space.placement, space.cut(*start))
    return search(
        problem if is_limited else without_limit(problem), SearchOptions("quick", time_limit=seconds)
    )


def _simple(space: CutSpace) -> dict[str, Bounds]:
    """The cuts that stand beside, by name."""
    return {EVEN: even_cut(space), HISTOGRAM: histogram_cut(space)}
