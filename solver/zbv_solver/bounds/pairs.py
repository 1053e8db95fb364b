"""A bound for problems with pairs: a rank runs all forwards before its first backward alone.

The other bounds look at a problem in which every F has the length that the best pair leaves of it (Lemma 59).
In the ramp at the beginning, no backward is there to be paired with.
"""

from __future__ import annotations

import numpy as np

from zbv_solver.kernels.jit import FloatArray
from zbv_solver.problem.problem import F, Problem


def pair_bounds(problem: Problem) -> list[float]:
    """For every rank, a lower bound of the objective by its load and its ramp: Lemma 60."""
    return [pair_bound(problem, rank) for rank in range(problem.pp_degree)]


def pair_bound(problem: Problem, rank: int, later: float = 0.0) -> float:
    """The bound of one rank whose first backward is delayed by ``later``: Lemmas 60 and 66."""
    arrays, count = problem.arrays, problem.arrays.count
    forward, inputs, weights, fused = arrays.duration
    saved = forward - problem.with_forwards_shortened().arrays.duration[F]
    work = forward - saved + np.minimum(fused, inputs + weights)
    # No microbatch is faster than this on its way down and up again.
    down, up = forward.min(axis=1), np.minimum(inputs, fused).min(axis=1)
    transfer = arrays.latency.min(axis=1)
    stages = list(problem.placement.stages_of[rank])
    first, last = min(stages), max(stages)
    ramp = down[first:].sum() + transfer[first:].sum() + up[last + 1 :].sum() + transfer[last:].sum()
    value = work[stages].sum(axis=0) @ count
    value += _lost(ramp + later, (forward[stages] * count).ravel(), (saved[stages] * count).ravel())
    if problem.objective == "makespan":
        value += down[:first].sum() + transfer[:first].sum()
        value += max(0.0, up[:first].sum() + transfer[:first].sum() - weights[stages].sum(axis=0) @ count)
    return float(value)


def _lost(ramp: float, forward: FloatArray, saved: FloatArray) -> float:
    """The least time lost in a ramp, where every time unit is idle, or is that of an F without a partner.

    ``forward`` and ``saved`` have the durations of all F's of the same kind, and what pairs would save.
    """
    lost = 0.0
    kinds = [(saving / length, length) for length, saving in zip(forward, saved, strict=True) if length > 0]
    for share, length in sorted(kinds):
        taken = min(ramp, length)
        lost += share * taken
        ramp -= taken
    return lost + ramp
