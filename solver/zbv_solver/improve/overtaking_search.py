"""Orders in which small microbatches overtake a few large ones.

The large microbatches are planned alone, as if there were no others. Then a search over the parameters of
:mod:`zbv_solver.construct.overtaking` fits the small ones in between. It pays where the path of the largest
microbatch takes longer than the work of any rank, so that ranks wait for it anyway.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from zbv_solver.construct.board import Attempt
from zbv_solver.construct.overtaking import Large, OvertakingRule, OvertakingScheduler
from zbv_solver.construct.rules import PATIENCE, changed
from zbv_solver.construct.tables import make_tables, sizes
from zbv_solver.improve.annealing import anneal_in_rounds
from zbv_solver.improve.parameter_search import parameter_search
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem

RATIO = 1.3
"""Every large microbatch has at least this many times the work of every small one."""
PLANNED, ANNEALED, ROUNDS = 0.25, 0.02, 6
"""Share of the budget for planning the large ones alone; moves of annealing, per action that this places; and
its rounds."""
MOST = 1_500
"""Most rules that are tried, for the large ones alone and for all."""
EXPLORATION = 0.3
"""Share of random rules; the others are neighbours of the best one."""
KEPT = 0.7
"""Probability that a neighbour keeps a parameter."""
DEADLINES = (1.0, 1.12)
"""Deadlines of the large ones, as multiples of the least time known for all microbatches."""
SLACKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
CAPS = (8, 16, 32, 1_000_000, 1_000_000, 1_000_000)
"""Half of the random rules have no cap."""


def large_ones(problem: Problem) -> IntArray:
    """The microbatches that others may overtake, ascending (n,); none if it would not pay."""
    size = sizes(problem)
    descending = np.argsort(-size, kind="stable")
    most = min(problem.pp_degree, problem.microbatches // 2)
    ratio = size[descending[:most]] / np.maximum(size[descending[1 : most + 1]], 1e-300)
    if problem.is_equal or most < 1 or ratio.max() < RATIO or _path(problem).max() < _most_load(problem):
        return np.empty(0, np.int64)
    return np.sort(descending[: int(ratio.argmax()) + 1])


def _path(problem: Problem) -> FloatArray:
    """The time of a microbatch of every kind from its first F to the end of its last I, (K,)."""
    arrays = problem.arrays
    path: FloatArray = arrays.duration[[F, I]].sum(axis=(0, 1)) + 2 * arrays.latency.sum(axis=0)
    return path


def _most_load(problem: Problem) -> float:
    """The least work of the rank that has most."""
    return float(make_tables(problem).loads(least=True).max())


def only(problem: Problem, chosen: IntArray) -> Problem:
    """The problem with only some of its microbatches, (n,)."""
    arrays = replace(problem.arrays, kind_of=problem.arrays.kind_of[chosen])
    return replace(problem, microbatches=len(chosen), features=(), model=None, given_arrays=arrays)


def overtaking_search(
    problem: Problem, placements: int, seed: int = 0, halt: IntArray | None = None
) -> Iterator[tuple[float, Orders] | None]:
    """Better and better orders with their objectives at earliest start, and None after other evaluations.

    Parameters
    ----------
    placements
        Number of actions that all evaluations together may place.
    halt
        (1,) uint8: another thread sets it to end the current evaluation.
    """
    chosen = large_ones(problem)
    if len(chosen) == 0:
        return
    alone = only(problem, chosen)
    planning = min(int(PLANNED * placements), MOST * alone.max_actions)
    planned = yield from _planned(alone, planning, seed, halt)
    if planned is None:
        return
    least, orders = planned
    rules = _Rules(problem, max(least, _most_load(problem)), np.random.default_rng(seed))
    scheduler = OvertakingScheduler(problem, Large.of(problem, chosen, alone, orders), halt)
    evaluations = min(MOST, int((1 - PLANNED) * placements) // problem.max_actions)
    best, kept = np.inf, None
    for evaluation in range(evaluations):
        explores = kept is None or evaluation < EXPLORATION * evaluations
        rule = rules.fresh() if explores or kept is None else rules.neighbour(kept)
        value = scheduler.value(rule, best)
        improved = value < best
        if value <= best and value < np.inf:
            best, kept = value, rule
        yield (best, scheduler.orders()) if improved else None


def _planned(
    alone: Problem, placements: int, seed: int, halt: IntArray | None
) -> Generator[None, None, tuple[float, Orders] | None]:
    """The objective and an order of the large microbatches alone; yields so that the caller can poll."""
    best: Attempt | None = None
    for attempt in parameter_search(alone, placements, seed, halt):
        best = best if attempt is None else attempt
        yield
    if best is None:
        return None
    moves = int(ANNEALED * placements) // ROUNDS
    planned = best.value, best.orders
    for value, orders in anneal_in_rounds(
        alone, best.orders, best.value, rounds=ROUNDS, moves=moves, factor=1.0, seed=seed * ROUNDS, halt=halt
    ):
        planned = value, orders
        yield
    return planned


class _Rules:
    """Random rules and their neighbours."""

    def __init__(self, problem: Problem, least: float, random: np.random.Generator):
        self.problem, self.least, self.random = problem, least, random
        self.size = sizes(problem)

    def fresh(self) -> OvertakingRule:
        """A random rule."""
        random, m, chunks = self.random, self.problem.microbatches, self.problem.placement.chunks
        entry = (
            random.permutation(m) if random.random() < 0.5 else np.argsort(self.size * random.choice((-1, 1)))
        )
        priority = np.zeros(4 * chunks)
        priority[[4 * chunk + letter for chunk in range(chunks) for letter in (F, I)]] = random.permutation(
            2 * chunks
        )
        return OvertakingRule(
            deadline=self.least * float(random.uniform(*DEADLINES)),
            slack=float(random.choice(SLACKS)),
            place=np.argsort(entry).astype(np.float64),
            priority=priority,
            cap=int(random.choice(CAPS)),
            patience=float(random.choice(PATIENCE)),
            by_arrival=bool(random.random() < 0.5),
        )

    def neighbour(self, rule: OvertakingRule) -> OvertakingRule:
        """The rule with some parameters of a random one, and often with another order of entry."""
        other, random = self.fresh(), self.random
        changes: dict[str, Any] = {
            name: value for name, value in other._asdict().items() if random.random() >= KEPT
        }
        mixed = rule._replace(**changes)
        if random.random() < 0.4:
            entry = changed(np.argsort(rule.place), random)
            mixed = mixed._replace(place=np.argsort(entry).astype(np.float64))
        return mixed
