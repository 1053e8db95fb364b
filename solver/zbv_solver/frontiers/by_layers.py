"""Memory limits of a frontier by layers, where every limit has its own cut and its own recomputed stages.

The memory of 1F1B depends on the cut, so limits are amounts of memory, equal on all ranks, instead of
fractions. The smallest limit is what the leanest cut needs with everything recomputed. At the largest limits,
recomputation no longer helps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zbv_solver.errors import InvalidInput
from zbv_solver.frontiers import memory_fraction
from zbv_solver.frontiers.limits import at_limit
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import even_bound, level_cut
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.least_memory import least_memory_cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Problem

STEPS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Limits between the smallest one (0) and the need of 1F1B without recomputation (1)."""
BEYOND = (1.25, 1.5, 2.0)
"""Limits above that: the static memory of 1F1B and this multiple of its activations."""


def limits(problem: LayeredProblem) -> tuple[float, ...]:
    """The limits to search, ascending; the first one is the smallest that is known to be feasible.

    Raises
    ------
    InvalidInput
        When no layer holds memory.
    """
    plain = _level(replace(problem, limit=None))
    activations = memory_fraction.one_f_one_b_memory(plain)
    if activations == 0:
        raise InvalidInput.at(
            "/layers",
            "no layer holds memory between its forward and its backward, so a limit has no effect. Give "
            "the layers' memory.forward, memory.backward_input and memory.backward_weight.",
        )
    least = smallest_limit(problem)
    static = max(plain.memory.static)
    most = static + activations
    above = [least + step * (most - least) for step in STEPS] if most > least else []
    above += [static + step * activations for step in BEYOND]
    return (least, *(limit for limit in above if limit > least * (1 + MEMORY_TOLERANCE)))


def smallest_limit(problem: LayeredProblem) -> float:
    """The smallest limit that some cut is known to fit; the problem's own limit is ignored.

    Exact for placements V and single. For loop only a heuristic is known, so loop counts only if it is the
    only placement.
    """
    exact = [placement for placement in problem.placements if placement.kind != "loop"]
    return min(_smallest(problem, placement) for placement in exact or problem.placements)


def floor(problem: LayeredProblem) -> float:
    """A lower bound on the objective of every cut that fits the limit, on every placement.

    For V and single it uses the exact least load. If no cut fits, it is the bound without a limit.
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
    """The problem of a cut with about even work, without recomputation, on the first placement."""
    placement = problem.placements[0]
    space = CutSpace(problem, placement, CutTables.of(problem))
    cut = space.cut(level_cut(space), (False,) * placement.n_stages)
    return problem.cut_into(placement, cut)


def _smallest(problem: LayeredProblem, placement: Placement) -> float:
    """The least memory that the fullest rank needs in any cut on a placement."""
    # With the mean need as the limit no cut fits, so the excess over it is minimised.
    mean = float(CutTables.of(problem).sums[..., 3, -1].min()) / problem.pp_degree
    tight = at_limit(problem, max(problem.static) + mean)
    space = CutSpace(tight, placement, CutTables.of(tight))
    # Under loop, proving that the heuristic's cut is the smallest would take CP-SAT seconds.
    least = least_memory_cut(space, level_cut(space), enough=np.inf)
    return max(tight.cut_into(placement, least.cut).smallest_limit)
