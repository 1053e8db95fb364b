"""Bounds for problems with copies to the host: what the engines can move while a rank works.

Memory times time limits how long microbatches are away from a rank. Copies free memory meanwhile, and how
many of them a step has room for depends on the engines. The proofs are in PROOFS.md, section 15.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.bounds.away import least_held, memory_of_cells
from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.problem.problem import F, Problem
from zbv_solver.problem.stages import Copies


def engine_bounds(problem: Problem, copies: Copies) -> list[float]:
    """For every rank, a lower bound of the objective by its memory and its engines: Lemma 61."""
    paths, n, m = MicrobatchPaths.of(problem), problem.n_stages, problem.microbatches
    bounds = []
    for rank, stages in enumerate(map(list, problem.placement.stages_of)):
        backwards = [2 * n - 1 - stage for stage in stages]
        length = paths.length[:, 0]
        away = paths.start[backwards, 0] - paths.start[stages, 0] - length[stages]
        held = problem.arrays.delta[F, stages, 0] * (length[stages] + away + length[backwards])
        held += least_held(problem, stages)[:, 0] * paths.rest[stages, 0]
        copied = np.array(copies.offload)[stages] + np.array(copies.reload)[stages]
        saved = np.array(copies.offloadable)[stages] * np.maximum(away - copied, 0.0)
        room = np.inf if copies.host_limit is None else copies.host_limit[rank]
        kinds = [(m * saving, m * time / 2) for saving, time in zip(saved, copied, strict=True)]
        capacity, needed = memory_of_cells(problem, rank), float(m * held.sum())
        least = needed / (capacity + room) if needed > 0 else 0.0  # without any memory, both are 0
        bounds.append(max(_least_time(capacity, needed, kinds), least))
    return bounds


def _least_time(capacity: float, needed: float, kinds: list[tuple[float, float]]) -> float:
    """The least T in which capacity · T and what copies save by then reach what is needed.

    All copies of a kind save an amount and take the engines a time. Those that save the most per time come
    first.
    """
    began, saved = 0.0, 0.0
    for saving, time in sorted(kinds, key=lambda kind: -np.inf if kind[1] == 0 else -kind[0] / kind[1]):
        if time > 0:
            rate = saving / time
            reached = (needed - saved + rate * began) / (capacity + rate) if capacity + rate > 0 else np.inf
            if reached <= began + time:
                return max(0.0, reached)
        began, saved = began + time, saved + saving
    return max(0.0, needed - saved) / capacity if needed > saved else 0.0
