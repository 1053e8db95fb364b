"""Cuts that need no search: the usual ones, for comparison, and one to start a search from."""

from __future__ import annotations

import numpy as np

from zbv_solver.partition.cut_space import Boundaries, CutSpace
from zbv_solver.problem.layer_letters import DECODER, letter_of


def even_cut(space: CutSpace) -> Boundaries:
    """Deal all transformer layers evenly; the layers before and after them go to the end stages.

    Megatron-LM does this unless it gets other numbers (``get_num_layers_to_build`` in
    ``megatron/core/transformer/transformer_block.py``), if the layers divide; here they need not. What is a
    transformer layer follows from the names of layers. With fewer of them than stages, all parts are dealt.
    """
    places, stages, n = space.problem.places, space.n_stages, space.problem.model.n_layers
    letters = [letter_of(layer.name) for layer in space.problem.model.each]
    blocks = [at for at, letter in enumerate(letters) if letter == DECODER]
    if len(blocks) < stages:
        blocks = list(range(n))
    dealt = np.linspace(0, len(blocks), stages + 1).round().astype(np.int64)
    bounds = np.array([*blocks, n])[dealt]
    bounds[0], bounds[-1] = 0, n
    return space.repaired(np.searchsorted(places, bounds))


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
