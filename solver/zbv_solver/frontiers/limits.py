"""Memory limits of a frontier, and which of the known plans and bounds apply at a limit.

Limits are fractions of 1F1B's memory (:mod:`zbv_solver.frontiers.memory_fraction`), or amounts of memory
where layers are cut. A plan has its place on the frontier at the smallest limit that it fits, and it also
counts at every larger limit. A lower bound that was proved for one limit also holds at every smaller limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem

LARGEST = 2.0
"""Largest limit, because hardly any schedule needs more than twice the memory of 1F1B."""
STEPS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, LARGEST)
"""Limits to search in addition to the smallest one; they are denser where memory is scarce."""


@dataclass(frozen=True)
class Known:
    """A known plan or classical schedule: its name, the smallest limit that it fits, and its objective.

    ``needs`` is a fraction of 1F1B's memory, or an amount of memory where layers are cut.
    """

    name: str
    needs: float
    value: float


def grid(problem: Problem) -> tuple[float, ...]:
    """The limits to search, as fractions: the smallest feasible one, then round ones above it.

    Raises
    ------
    InvalidInput
        When no stage holds memory.
    """
    least = memory_fraction.smallest(problem)
    return (least, *(step for step in STEPS if step > least * (1 + MEMORY_TOLERANCE)))


def at_limit(problem: LayeredProblem, limit: float) -> LayeredProblem:
    """The problem with this limit on every rank."""
    return replace(problem, limit=(limit,) * problem.pp_degree)


def fits(needs: float, limit: float) -> bool:
    """Whether a need is within a limit; both are fractions, or both are amounts."""
    return needs <= limit * (1 + MEMORY_TOLERANCE)


def best_within(limit: float, known: Sequence[Known]) -> Known | None:
    """The best plan that fits a limit; of equally good ones, the one that needs the least memory."""
    fitting = [each for each in known if fits(each.needs, limit)]
    return min(fitting, key=lambda each: (each.value, each.needs), default=None)


def staircase(known: Sequence[Known]) -> tuple[Known, ...]:
    """The Pareto-optimal plans, in ascending order of memory."""
    corners: list[Known] = []
    for each in sorted(known, key=lambda each: (each.needs, each.value)):
        if not corners or each.value < corners[-1].value:
            corners.append(each)
    return tuple(corners)


def tightened(bounds: Sequence[float]) -> tuple[float, ...]:
    """Lower bounds at ascending limits, each raised to those of larger limits, which also hold there."""
    best, found = 0.0, []
    for bound in reversed(bounds):
        best = max(best, bound)
        found.append(best)
    return tuple(reversed(found))
