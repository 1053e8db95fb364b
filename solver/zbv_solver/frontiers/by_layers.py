"""Time against memory where layers are to be cut: every limit has its own cut, and recomputes what it must.

What 1F1B would hold depends on the cut, so limits are amounts of memory, the same on every rank, and not
fractions. They begin where the cut that needs least, recomputed as far as it can be, just fits, and go on to
where recomputing has nothing left to give and beyond.
"""

from __future__ import annotations

from dataclasses import replace

from zbv_solver.errors import InvalidInput
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import at_limit
from zbv_solver.partition.balance import smallest_cut
from zbv_solver.partition.cut_space import CutSpace
from zbv_solver.partition.cut_tables import CutTables
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.settle import settled_cut
from zbv_solver.partition.simple_cuts import level_cut
from zbv_solver.partition.starts import even_bound
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Problem

STEPS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Limits between the smallest and what 1F1B needs with nothing recomputed, as shares of what is between."""
BEYOND = (1.25, 1.5, 2.0)
"""Limits above that: 1F1B's static memory, and that many times its activations."""


def limits(problem: LayeredProblem) -> tuple[float, ...]:
    """The limits that are searched, ascending: the smallest that is known to be feasible comes first.

    Raises
    ------
    InvalidInput
        When the layers say nothing about memory.
    """
    plain = _level(replace(problem, limit=None))
    activations = memory_fraction.one_f_one_b_memory(plain)
    if activations == 0:
        raise InvalidInput.at(
            "/layers",
            "no layer holds memory between its forward and its backward, so a limit changes nothing. Give "
            "the layers' memory.forward, memory.backward_input and memory.backward_weight.",
        )
    least = smallest_limit(problem)
    static = max(plain.memory.static)
    most = static + activations
    above = [least + step * (most - least) for step in STEPS] if most > least else []
    above += [static + step * activations for step in BEYOND]
    return (least, *(limit for limit in above if limit > least * (1 + MEMORY_TOLERANCE)))


def smallest_limit(problem: LayeredProblem) -> float:
    """The smallest limit of every rank that a cut is known to fit, whatever the problem's own limit is.

    Exact for placements V and single; loop is looked at only where there is no other, and what was found
    counts.
    """
    exact = [placement for placement in problem.placements if placement.kind != "loop"]
    return min(_smallest(problem, placement) for placement in exact or problem.placements)


def floor(problem: LayeredProblem) -> float:
    """A lower bound on the objective of every cut that fits the limit, on every placement.

    Exact in the loads of V and single; what no cut fits has the bound that holds without its limit.
    """
    tables = CutTables.of(problem)
    least = least_worst_load(problem, tables)
    worst = []
    for placement in problem.placements:
        if placement.kind == "loop":  # no exact minimum is known
            return problem.microbatches * least
        space = CutSpace(problem, placement, tables)
        balanced = even_bound(space, level_cut(space))
        if balanced is not None:
            worst.append(max(least, balanced.worst))
    return problem.microbatches * min(worst, default=least)


def _level(problem: LayeredProblem) -> Problem:
    """The layers cut so that work is about even, nothing recomputed, on the first placement."""
    placement = problem.placements[0]
    space = CutSpace(problem, placement, CutTables.of(problem))
    cut = space.cut(level_cut(space), (False,) * placement.n_stages)
    return problem.cut_into(placement, cut)


def _smallest(problem: LayeredProblem, placement: Placement) -> float:
    """What the fullest rank needs of the cut on which it needs least."""
    tables = CutTables.of(problem)
    # No rank can fit less than the mean, so what is made small is what ranks lack.
    mean = float(tables.sums[:, 3, -1].min()) / problem.pp_degree
    tight = at_limit(problem, max(problem.static) + mean)
    space = CutSpace(tight, placement, CutTables.of(tight))
    level = level_cut(space)
    if placement.kind == "loop":
        recompute = (tables.variants == 2,) * placement.n_stages
        cut = space.cut(settled_cut(space, level), recompute)
    else:
        found = smallest_cut(space, level)
        if found is None:
            raise RuntimeError("there is no cut at all; this is a fault of ours, please report it.")
        cut = found.cut
    return max(tight.cut_into(placement, cut).smallest_limit)
