"""Cuts that need no search: what users have today, to stand beside the planner's, and one to start from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from zbv_solver.partition.cut_space import Bounds, CutSpace

LONGEST_PERIOD = 4
"""Parts after which a model repeats itself, at most: a block is one part, or attention and MLP, or finer."""


def even_cut(space: CutSpace) -> Bounds:
    """The longest run of repeated layers dealt evenly; what comes before and after goes to the end stages.

    That is what Megatron-LM does without first and last pipeline layers being set: transformer blocks are
    dealt, the embedding and the head come on top. Without a run long enough, all parts are dealt evenly.
    """
    problem, stages = space.problem, space.n_stages
    each = problem.model.each
    parts = [
        tuple((layer.costs, layer.recompute) for layer in each[begin:end])
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
    """Begin and end of the longest run in which every part is that of a period before; at least twice."""
    best, begin = (0, 0), 0
    for place in range(period, len(parts) + 1):
        if place == len(parts) or parts[place] != parts[place - period]:
            if place - begin >= 2 * period and place - begin > best[1] - best[0]:
                best = begin, place
            begin = place - period + 1
    return best


def histogram_cut(space: CutSpace) -> Bounds:
    """GPipe's cut: a layer's stage is its place in the cumulative histogram of costs (Huang et al. 2019).

    Lingvo's ``PartitionSequentialLayers``: of K partitions, the layer after which the share c of the cost is
    done goes to partition int(c K). Partitions that stay empty take a layer of their neighbour.
    """
    sums, stages = space.tables.sums[0], space.n_stages
    done = sums[0] + np.minimum(sums[1], sums[2])
    total = done[-1] if done[-1] > 0 else 1.0
    stage_of = np.minimum((done[1:] / total * stages).astype(np.int64), stages - 1)
    bounds = np.searchsorted(stage_of, np.arange(stages + 1))
    bounds[-1] = space.tables.n
    return space.repaired(bounds)


def level_cut(space: CutSpace) -> Bounds:
    """Every bound where the work done so far is nearest to its even share: where searches start."""
    done, stages = space.tables.cheapest, space.n_stages
    shares = done[-1] * np.arange(stages + 1) / stages
    after = np.clip(np.searchsorted(done, shares), 1, space.tables.n)
    nearest = np.where(shares - done[after - 1] <= done[after] - shares, after - 1, after)
    return space.repaired(nearest)
