"""From traces of ranks to jitter: by which factors measured durations varied.

The duration of an action, divided by the median of its stage and letter, is the product of a factor of its
rank in this step (the median of those quotients) and its own factor. Latencies of transfers are divided
by the median of their boundary. If microbatches differ, durations and latencies are first divided by the
planned ones of their microbatch. Only latencies of transfers that the receiver waited for are known
(:mod:`zbv_solver.measure.refit`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zbv_solver.jitter.noise import MAX_FACTOR, NO_SPREAD, Jitter, Spread
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.measure.rank_trace import RankTrace
from zbv_solver.measure.refit import collect, grouped_medians, latencies
from zbv_solver.problem.problem import LETTERS, B, I, Problem

MOST_SAMPLES = 1000
"""More factors than this are replaced by as many quantiles."""
_DIGITS = 4
"""Significant digits of a factor."""


def jitter_of_traces(problem: Problem, traces: Sequence[RankTrace]) -> Jitter:
    """The jitter that ranks measured; I or B take the factors of the other one if only one of them was run.

    Parameters
    ----------
    traces
        Traces of some or all ranks, replicas and steps of a plan of this problem, on one clock.

    Raises
    ------
    InvalidInput
        When a trace belongs to another problem, or no trace has a step.
    """
    samples = collect(problem, traces)
    n_stages, p = problem.n_stages, problem.pp_degree
    arrays = problem.arrays
    took = samples.duration
    if not problem.is_equal:
        took = _by(took, arrays.durations(samples.stage, samples.letter, samples.microbatch))
    factor = _relative(samples.letter * n_stages + samples.stage, took)
    rank = samples.run * p + problem.arrays.rank_of[samples.stage]
    shared = grouped_medians(rank, factor, int(rank.max()) + 1)
    own = factor / np.where(shared[rank] > 0, shared[rank], 1.0)
    actions = [_spread(own[samples.letter == letter]) for letter in range(len(LETTERS))]
    for letter, other in ((I, B), (B, I)):
        if actions[letter] is NO_SPREAD:
            actions[letter] = actions[other]
    boundary, latency, kind = latencies(problem, samples)
    if not problem.is_equal:
        latency = _by(latency, arrays.latency[boundary, kind])
    return Jitter.by_letter(
        actions, (_spread(shared[np.isfinite(shared)]),), _spread(_relative(boundary, latency))
    )


def _by(measured: FloatArray, planned: FloatArray) -> FloatArray:
    """Measured by planned numbers; only measured where none is planned."""
    return np.divide(measured, planned, out=measured.copy(), where=planned > 0)


def _relative(group: IntArray, values: FloatArray) -> FloatArray:
    """Values divided by the median of their group; 1 where that is 0."""
    if not len(values):
        return values
    median = grouped_medians(group, values, int(group.max()) + 1)[group]
    return np.divide(values, median, out=np.ones_like(values), where=median > 0)


def _spread(factors: FloatArray) -> Spread:
    """The distribution of factors; none if there are fewer than two."""
    if len(factors) < 2:
        return NO_SPREAD
    if len(factors) > MOST_SAMPLES:
        factors = np.quantile(factors, (np.arange(MOST_SAMPLES) + 0.5) / MOST_SAMPLES)
    kept = np.sort(np.minimum(factors, MAX_FACTOR)).tolist()
    return Spread(samples=tuple(float(f"{factor:.{_DIGITS}g}") for factor in kept))
