"""Cuts to begin a search with: the usual ones, the most even ones, and those that leave room in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from zbv_solver.kernels.jit import FloatArray
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import Boundaries, CutSpace, ScoredCut
from zbv_solver.partition.settle import settled_cut
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layer import DECODER, letter_of


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


EVEN, HISTOGRAM = "even-cut", "histogram-cut"


def even_bound(space: CutSpace, level: Boundaries) -> ScoredCut | None:
    """The most even cut within the verifier's tolerance; its load bounds that of every cut with a plan."""
    tables = space.tables._replace(room=space.tables.most_room)
    return balanced_cut(replace(space, tables=tables), level)


def fitting_starts(space: CutSpace, level: Boundaries, seed: int = 0) -> tuple[dict[str, Cut], float | None]:
    """Cuts that fit, by name, the most even first; and a lower bound on the worst load of cuts that fit.

    The bound is 0 for the loop placement, where none is known, and None if it is proved that no cut fits.
    """
    found: dict[str, Cut] = {}
    simple, worst = {"level": level, HISTOGRAM: histogram_cut(space), EVEN: even_cut(space)}, 0.0
    if space.placement.kind == "loop":
        simple = {"balanced": settled_cut(space, level, seed), **simple}
    else:
        balanced = even_bound(space, level)
        if balanced is None:
            return {}, None
        worst = balanced.value
        if space.excess(balanced.cut) > 0:
            balanced = balanced_cut(space, level)  # the other one fits only within the verifier's tolerance
        if balanced is not None:
            found["balanced"] = balanced.cut
    for name, bounds in simple.items():
        cut = space.fitting(bounds)
        if cut is not None:
            found[name] = cut
    return found, worst


IN_FLIGHT = (0.15, 0.25, 1 / 3, 0.5, 2 / 3, 1.0)
"""Microbatches that a rank has room for on all its stages, in multiples of p: 1F1B and ZB-V hold 1, V-Half
1/2 and V-Min 1/3."""
FIRST_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the model's work, from its beginning, that are recomputed in any case."""
NEVER = 1e12
"""A multiple of a part's activations for which no rank has room."""


def roomy_cuts(space: CutSpace, start: Boundaries, least: float = 0.0) -> Iterator[Cut]:
    """The most even cuts with room for several microbatches.

    In some of them, all stages have room for the same number of microbatches. In others, early stages have
    room for more than late ones, because they hold an activation longer (Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory", section 3: the lifespan of a stage). In others again, early stages
    are recomputed, and all have room for one microbatch.

    ``least`` is a known lower bound of the worst load of every cut that fits.
    """
    if not np.isfinite(space.tables.room).all():
        return
    known: list[tuple[FloatArray, float]] = []
    for times in rooms(space):
        # A cut with this much room has room for less, too.
        least_with_room = max([least, *(worst for less, worst in known if (less <= times).all())])
        if least_with_room == np.inf:
            continue
        roomy = with_room(space, times)
        if space.placement.kind != "loop":
            found = balanced_cut(roomy, start, least_with_room)
        else:  # The bounds stay as they are: they were settled, and will be moved.
            cut = roomy.fitting(start)
            found = None if cut is None else ScoredCut(cut, least_with_room)
        known.append((times, np.inf if found is None else found.value))
        if found is not None:
            yield found.cut


def rooms(space: CutSpace) -> Iterator[FloatArray]:
    """Multiples of every part's activations to make room for: (2, n), plain and recomputed."""
    work = np.diff(space.tables.cheapest)
    done = (np.cumsum(work) - work / 2) / (float(work.sum()) or 1.0)
    for share in IN_FLIGHT:
        flat = max(1.0, share * space.placement.pp_degree) * np.ones((2, space.tables.n))
        yield flat
        yield np.maximum(1.0, 2 * flat * (1 - done))
    if space.tables.variants == 2:
        for share in FIRST_SHARES:
            yield np.array([np.where(done < share, NEVER, 1.0), np.ones(space.tables.n)])


def with_room(space: CutSpace, times: FloatArray) -> CutSpace:
    """The space with each part's activation memory multiplied by ``times`` (2, n), plain and recomputed."""
    tables = space.tables
    sums = tables.sums.copy()
    # Row 3 holds activations and static memory. Only activations are multiplied.
    sums[:, :, 3, 1:] += np.cumsum(np.diff(tables.held) * (times - 1), axis=2)
    return replace(space, tables=tables._replace(sums=sums))
