"""Improve a cut by local search, where constructed orders estimate its objective.

Even loads do not imply that the stages can be ordered well. Starting from the best cut, a move shifts one
part between two stages or changes which stages are recomputed. A cut is not estimated if its load alone
already rules it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zbv_solver.partition.cut_space import Boundaries, CutSpace
from zbv_solver.partition.judge import Judge
from zbv_solver.problem.numeric import OPTIMAL_GAP

MOST_IN_VAIN = 12
"""The search ends after this many moves in a row without a gain, in multiples of the number of stages."""
RECOMPUTING = 0.4
"""Share of moves that change which stages are recomputed, if any layer can be recomputed."""


@dataclass(frozen=True)
class Candidate:
    """A cut, the name of the method that made it, and the estimate of its objective."""

    name: str
    bounds: Boundaries
    recompute: tuple[bool, ...]
    value: float


def improve_cut(
    judge: Judge, start: Candidate, placements: int, seed: int, is_over: Callable[[], bool]
) -> Candidate:
    """The best cut found by moves from a first one.

    Parameters
    ----------
    placements
        Actions that estimates may place.
    is_over
        Polled between cuts.
    """
    random = np.random.default_rng(seed)
    best, space = start, judge.space
    until, in_vain = judge.placed + placements, 0
    while judge.placed < until and in_vain < MOST_IN_VAIN * space.n_stages and not is_over():
        in_vain += 1
        moved = neighbour(space, best, random)
        if moved is None or judge.floor(*moved) >= best.value:
            continue
        value = judge.value(*moved)
        if value <= best.value:
            if value < best.value * (1 - OPTIMAL_GAP):
                in_vain = 0
            best = Candidate("moved", *moved, value)
    return best


def neighbour(
    space: CutSpace, start: Candidate, random: np.random.Generator
) -> tuple[Boundaries, tuple[bool, ...]] | None:
    """A random neighbour of a cut; None if the rules or the memory limit forbid it."""
    if space.tables.variants > 1 and random.random() < RECOMPUTING:
        recompute = _recomputed_elsewhere(start.recompute, random)
        return (start.bounds, recompute) if space.excess(start.bounds, recompute) <= 0 else None
    if space.n_stages == 1:
        return None
    low, high = sorted(map(int, random.choice(space.n_stages, 2, replace=False)))
    step = int(random.choice((-1, 1)))
    bounds = tuple(
        bound + step if low < number <= high else bound for number, bound in enumerate(start.bounds)
    )
    if not space.allows(bounds):
        return None
    if space.excess(bounds, start.recompute) <= 0:
        return bounds, start.recompute
    fitting = space.fitting(bounds, start.recompute)
    return None if fitting is None else (bounds, fitting)


def _recomputed_elsewhere(recompute: tuple[bool, ...], random: np.random.Generator) -> tuple[bool, ...]:
    """Change one stage, make a run of stages equal, or swap two stages."""
    changed, stages = list(recompute), len(recompute)
    one, other = sorted(map(int, random.integers(stages, size=2)))
    kind = int(random.integers(3))
    if kind == 0:
        changed[one] = not changed[one]
    elif kind == 1:
        changed[one : other + 1] = [bool(random.integers(2))] * (other + 1 - one)
    else:
        changed[one], changed[other] = changed[other], changed[one]
    return tuple(changed)
