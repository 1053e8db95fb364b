"""Cuts that need no search: the usual ones, for comparison, and one to start a search from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from zbv_solver.partition.cut_space import Boundaries, CutSpace

LONGEST_PERIOD = 4
"""Most parts per repeated block of a model: a block is one part, attention and MLP, or finer."""


def even_cut(space: CutSpace) -> Boundaries:
    """Deal the longest run of repeated layers evenly; layers before and after it go to the end stages.

    Megatron-LM does this if the first and last pipeline stages are not configured: it deals the transformer
    blocks, and adds the embedding and the head. Without a run that is long enough, all parts are dealt
    evenly.
    """
    problem, stages = space.problem, space.n_stages
    each = problem.model.each
    parts = [
        tuple((layer.costs, layer.recompute, layer.on) for layer in each[begin:end])
        for begin, end in pairwise(problem.places)
    ]
    begin, end = max(
        (_longest_run(parts, period) for period in range(1, LONGEST_PERIOD + 1)),
        key=lambda run: run[1] - run[0],  # of the same length, the first: the shortest period
    )
    if end - begin < stages:
        begin, end = 0, len(parts)
    dealt = np.linspace(begin, end, stages + 1).round().astype(np.int64)
    dealt[0], dealt[-1] = 0, len(parts)
    return space.repaired(dealt)


def _longest_run(parts: Sequence[object], period: int) -> tuple[int, int]:
    """Begin and end of the longest run with a period, repeated at least twice."""
    best, begin = (0, 0), 0
    for place in range(period, len(parts) + 1):
        if place == len(parts) or parts[place] != parts[place - period]:
            if place - begin >= 2 * period and place - begin > best[1] - best[0]:
                best = begin, place
            # The parts at place - period and place differ, so no run contains both.
            begin = place - period + 1
    return best


def histogram_cut(space: CutSpace) -> Boundaries:
    """GPipe's cut: a layer's stage is its place in the cumulative histogram of costs (Huang et al. 2019).

    This is Lingvo's ``PartitionSequentialLayers``: of K partitions, the layer with the cumulative cost share
    c goes to partition int(c K). Empty partitions take a layer from their neighbour.
    """
    sums, stages = space.tables.sums[0, 0], space.n_stages
    done = sums[0] + np.minimum(sums[1], sums[2])
    total = done[-1] if done[-1] > 0 else 1.0
    stage_of = np.minimum((done[1:] / total * stages).astype(np.int64), stages - 1)
    bounds = np.searchsorted(stage_of, np.arange(stages + 1))
    bounds[-1] = space.tables.n
    return space.repaired(bounds)


def level_cut(space: CutSpace) -> Boundaries:
    """Place every boundary where the cumulative work is nearest to an even share: the start of searches.

    A stage's share is in proportion to the speed of its rank.
    """
    done = space.tables.cheapest
    speeds = np.concatenate(([0.0], np.cumsum(space.tables.speeds[list(space.placement.rank_of)])))
    shares = done[-1] * speeds / speeds[-1]
    after = np.clip(np.searchsorted(done, shares), 1, space.tables.n)
    nearest = np.where(shares - done[after - 1] <= done[after] - shares, after - 1, after)
    return space.repaired(nearest)
