"""Time against memory: the best objective that is known within every limit, and what is proven about it.

Limits are fractions of 1F1B's memory (:mod:`zbv_solver.frontiers.memory_fraction`). A plan stands at the fraction that
it needs, not at the one it was searched for, and counts for every larger limit too: the frontier is a running
minimum. In the same way a lower bound proven for a limit holds for every smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem

LARGEST = 2.0
"""The frontier ends at twice 1F1B's memory: hardly any schedule needs more."""
STEPS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, LARGEST)
"""Limits that are searched beside the smallest: closer together where memory is what a schedule lacks."""


@dataclass(frozen=True)
class Known:
    """A plan, or a classical schedule, that is known: what it needs, and its objective.

    ``needs`` is a fraction of 1F1B's memory; where layers are cut anew, an amount.
    """

    name: str
    needs: float
    value: float


def grid(problem: Problem) -> tuple[float, ...]:
    """The fractions whose limits are searched: the smallest feasible one, then round ones above it.

    Raises
    ------
    InvalidInput
        When the problem says nothing about memory.
    """
    least = memory_fraction.smallest(problem)
    return (least, *(step for step in STEPS if step > least * (1 + MEMORY_TOLERANCE)))


def at_limit(problem: LayeredProblem, limit: float) -> LayeredProblem:
    """Layers with that limit on every rank, whatever their own is (:mod:`zbv_solver.frontiers.by_layers`)."""
    return replace(problem, limit=(limit,) * problem.pp_degree)


def fits(needs: float, limit: float) -> bool:
    """Whether what needs a fraction, or an amount, fits in another one."""
    return needs <= limit * (1 + MEMORY_TOLERANCE)


def best_within(limit: float, known: Sequence[Known]) -> Known | None:
    """The best of what fits a fraction, or an amount; of equally good ones, that which needs least."""
    fitting = [each for each in known if fits(each.needs, limit)]
    return min(fitting, key=lambda each: (each.value, each.needs), default=None)


def staircase(known: Sequence[Known]) -> tuple[Known, ...]:
    """Those that nothing else beats, by what they need: the corners of the frontier."""
    corners: list[Known] = []
    for each in sorted(known, key=lambda each: (each.needs, each.value)):
        if not corners or each.value < corners[-1].value:
            corners.append(each)
    return tuple(corners)


def tightened(bounds: Sequence[float]) -> tuple[float, ...]:
    """Bounds at ascending limits, each raised to those of larger limits, which hold there too."""
    best, found = 0.0, []
    for bound in reversed(bounds):
        best = max(best, bound)
        found.append(best)
    return tuple(reversed(found))
