"""All cuts of a few layers into a few stages, and what is proved of each without timing it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product

import numpy as np
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.partition.fixed_order import Terms
from zbv_solver.partition.runs import WHOLE, Choice, First, Recomputed, Runs
from zbv_solver.problem.numeric import ROUNDING

MOST_CUTS = 200_000
"""Most cuts, with what is recomputed, that are listed."""
AT_ONCE = 4_000
"""Cuts whose bounds are computed together."""


def all_bounds(runs: Runs, most_load: float = np.inf, most: int = MOST_CUTS) -> IntArray | None:
    """(n, S+1) the boundaries of all cuts that the rules allow; None if there are more than ``most``.

    Cuts are left out if a rank works longer than ``most_load`` for one microbatch.
    """
    forward, inputs, weights, fused = runs.duration.transpose(1, 0, 2)
    work = np.repeat((forward + np.minimum(inputs + weights, fused)).min(axis=0), runs.size)
    before = np.append(0.0, np.cumsum(work))
    most_load = most_load * (1 + ROUNDING)
    rank_of = runs.space.placement.rank_of
    found, loads = np.zeros((1, 1), np.int64), np.zeros((1, runs.space.placement.pp_degree))
    for stage, (low, high) in enumerate(zip(runs.lower[1:], runs.upper[1:], strict=True)):
        places = np.arange(low, high + 1)
        steps = places[None, :] - found[:, -1:]
        size = runs.sizes.get(stage)
        is_allowed = steps >= runs.least if size is None else steps == size
        own = loads[:, rank_of[stage], None] + before[places][None, :] - before[found[:, -1:]]
        # Later stages can take what is left of every rank whose last stage is not behind.
        later = list({rank_of[after] for after in range(stage + 1, runs.space.n_stages)})
        room = (most_load - loads[:, later]).sum(axis=1)[:, None]
        if rank_of[stage] in later:
            room = room - (own - loads[:, rank_of[stage], None])
        is_allowed &= (own <= most_load) & (before[-1] - before[places][None, :] <= room)
        rows, at = np.nonzero(is_allowed)
        if len(rows) > most:
            return None
        loads = loads[rows]
        loads[:, rank_of[stage]] = own[rows, at]
        found = np.concatenate([found[rows], places[at][:, None]], axis=1)
    return found


def proved_of(runs: Runs, terms: Collection[Terms], bounds: IntArray, recompute: Recomputed) -> FloatArray:
    """(n,) what cuts with these boundaries (n, S+1) take at least: the largest of the terms. Lemma 52."""
    found = np.zeros(len(bounds))
    if not terms:
        return found
    rows = [runs.row_of_terms(each).scaled(1 / each.length) for each in terms]
    # A row is a sum of functions of one boundary each, and of two for first layers that are recomputed.
    places = runs.counts(tuple(range(int(runs.begin[-1]) + 1)))
    slopes = np.array([places @ row.slope.T for row in rows])  # (K, n+1, S+1)
    again = np.array([row.again for row in rows])
    fixed = np.array([row.fixed for row in rows])[:, None]
    numbers = np.arange(bounds.shape[1])
    for begin in range(0, len(bounds), AT_ONCE):
        some = bounds[begin : begin + AT_ONCE]
        values = fixed + slopes[:, some, numbers].sum(axis=2)
        if any(recompute):
            counts = places[some]
            able = np.diff(counts, axis=1) * runs.can_recompute
            before = np.cumsum(able, axis=2) - able
            repeated = np.clip(np.array(recompute)[None, :, None] - before, 0.0, able)
            values += np.tensordot(again, repeated, ((1, 2), (1, 2)))
        found[begin : begin + AT_ONCE] = values.max(axis=0)
    return found


def listed_cuts(
    runs: Runs, recompute: Recomputed | First | None, terms: Collection[Terms], most_load: float
) -> Iterator[tuple[float, Choice]] | None:
    """All cuts with what is proved of each, the least first; None if there are too many.

    ``most_load`` is as in :func:`all_bounds`.
    """
    stages = runs.space.n_stages
    variants: list[Recomputed] = [recompute] if isinstance(recompute, tuple) else []
    if recompute is None:
        variants = [*product((0, WHOLE), repeat=stages)] if 2**stages <= MOST_CUTS else []
    elif isinstance(recompute, First):
        most = min(recompute.most, max(recompute.least, int(runs.can_recompute @ runs.size)))
        variants = [(number,) * stages for number in range(recompute.least, most + 1)]
    bounds = all_bounds(runs, most_load, MOST_CUTS // max(1, len(variants))) if variants else None
    if bounds is None:
        return None
    proved = np.concatenate([proved_of(runs, terms, bounds, each) for each in variants])
    order = np.argsort(proved, kind="stable").tolist()
    return (
        (float(proved[at]), (tuple(bounds[at % len(bounds)].tolist()), variants[at // len(bounds)]))
        for at in order
    )
