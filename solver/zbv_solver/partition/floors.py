"""Lower bounds on the load of the most loaded rank over all cuts, for any placement."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product

import numpy as np

from zbv_solver.partition.cut_space import CutTables, layer_table, least_costs
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import ROUNDING

MOST_OTHERS = 4
"""Most parts besides those of the most frequent kind that are packed."""
MOST_SUMS = 200_000
"""Most distinct loads that are listed; with more kinds of layers, the mean load is the bound."""


def least_worst_load(problem: LayeredProblem, tables: CutTables) -> float:
    """A lower bound on the most loaded rank's work for one microbatch, for any placement.

    The load is at least the mean, with as much recomputed as the total memory demands. It is at least the
    load of the rank with the most parts. And it is a sum of whole layers. Ranks of several devices count by
    their speeds, and parts are packed into them. Lemmas 31, 32, 33, 37, 56 and 57 of bounds/PROOFS.md.
    """
    mean = max(_least_total(tables) / float(tables.speeds.sum()), _most_parts(problem.pp_degree, tables))
    mean = max(mean, _packed_load(problem))
    above = []
    for device in problem.kinds:
        sums = _possible_loads(problem, device)
        if sums is None:
            return mean
        at = int(np.searchsorted(sums, mean * (1 - ROUNDING)))
        above += [float(sums[at])] if at < len(sums) else []
    return max(mean, min(above, default=mean))


def _most_parts(p: int, tables: CutTables) -> float:
    """In every cut, some rank has k + 1 of the kp + 1 largest parts: at least the k + 1 smallest of these.

    No rank is faster than speed 1, in which the parts are measured.

    The pigeonhole bound of scheduling on identical machines (Dell'Amico and Martello 1995, section 2.2).
    """
    parts = np.sort(np.diff(tables.cheapest))[::-1]
    # `more` is k of Lemma 31: all k >= 1 with at least kp + 1 parts.
    more = np.arange(1, (len(parts) - 1) // p + 1)
    up_to = np.concatenate(([0.0], np.cumsum(parts)))
    crowded = up_to[more * p + 1] - up_to[more * p - more]
    return float(max(parts[0], crowded.max(initial=0.0))) * (1 - ROUNDING)


def _packed_load(problem: LayeredProblem) -> float:
    """The least load of the most loaded rank if parts were packed into ranks in any order: Lemma 57.

    Of the parts, only the kind with the most copies and the largest `MOST_OTHERS` others count.
    """
    costs = np.add.reduceat(least_costs(layer_table(problem)), problem.places[:-1], axis=1)  # (K, n)
    kinds, copies = np.unique(costs, axis=1, return_counts=True)
    often = int(copies.argmax())
    block, count = kinds[:, often], int(copies[often])
    others = np.repeat(np.delete(kinds, often, axis=1), np.delete(copies, often), axis=1)
    others = others[:, np.argsort(-others.min(axis=0))[:MOST_OTHERS]]
    if not block.min() > 0:
        return 0.0
    # (2^others, others): which of the others a set has; (K, 2^others): what the set costs.
    sets = np.array(list(product((0, 1), repeat=others.shape[1])), np.int64)
    of_set = others @ sets.T
    apart = [
        (one, two)
        for one in range(len(sets))
        for two in range(len(sets))
        if not (sets[one] & sets[two]).any()
    ]
    before, added = np.array(apart).T
    both = before + added  # sets are numbered in binary

    def fits(load: float) -> bool:
        """Whether all parts fit into ranks with at most this load."""
        room = load * (1 + ROUNDING) - of_set
        blocks = np.where(room >= 0, np.floor(room / block[:, None]), -np.inf)
        most = np.where(np.arange(len(sets)) == 0, 0.0, -np.inf)  # blocks, by the set that is in ranks so far
        for kind in problem.kind_of:
            grown = np.full(len(sets), -np.inf)
            np.maximum.at(grown, both, most[before] + blocks[kind, added])
            most = grown
        return bool(most[-1] >= count)

    loads = np.unique(block[:, None, None] * np.arange(count + 1) + of_set[:, :, None])
    at = bisect_left(loads, x=True, key=fits)
    return float(loads[at]) * (1 - ROUNDING) if at < len(loads) else 0.0


def _least_total(tables: CutTables) -> float:
    """Least total work of all layers such that their total memory fits the total room of all ranks.

    This is the relaxation of a knapsack: fractions of parts may be recomputed, in ascending order of the work
    per saved memory. With several devices, a part's work is the least of its costs times speed over the
    devices, and its memory is the least, too.
    """
    each = np.diff(tables.sums)  # (K, 2, 4, n)
    speed_of = np.ones(len(each))
    speed_of[tables.kind_of] = tables.speeds
    loads = (each[:, :, 0] + np.minimum(each[:, :, 1], each[:, :, 2])) * speed_of[:, None, None]
    (load, load_again), (held, held_again) = loads.min(axis=0), each[:, :, 3].min(axis=0)
    lacking = float(held.sum() - tables.most_room.sum())
    if tables.variants == 1 or not lacking > 0:
        return float(tables.cheapest[-1])
    # A part that is cheaper when recomputed costs nothing extra: `total` has its cheaper variant.
    costs = np.maximum(load_again - load, 0.0)
    saved = held - held_again
    saving = np.flatnonzero(saved > 0)
    order = saving[np.argsort(costs[saving] / saved[saving])]
    total = float(np.minimum(load, load_again).sum())
    for part in order:
        if lacking <= 0:
            break
        share = min(1.0, lacking / saved[part])
        total += share * costs[part]
        lacking -= share * saved[part]
    return max(float(tables.cheapest[-1]), total)


def _possible_loads(problem: LayeredProblem, device: str | None) -> np.ndarray | None:
    """All loads that a set of layers can have on a device, ascending; None if there are too many."""
    counts: dict[tuple[float, ...], int] = {}
    gains = set()
    for layer in problem.model.each:
        again = () if layer.recompute is None else (True,)
        variants = [layer.costs_when(recomputed, device) for recomputed in (False, *again)]
        gains |= {np.sign(costs.fused - costs.split) for costs in variants}
        loads = tuple(costs.forward + min(costs.fused, costs.split) for costs in variants)
        counts[loads] = counts.get(loads, 0) + 1
    if {-1.0, 1.0} <= gains:
        return None  # then the cheaper backward of a stage is not the sum of its layers' cheaper ones
    sums = np.zeros(1)
    for loads, count in counts.items():
        taken = np.arange(count + 1)
        if len(loads) == 1:
            more = taken * loads[0]
        else:
            first, second = np.meshgrid(taken, taken)
            # `first` layers are plain, `second` recomputed, and the others of this kind are on other ranks.
            more = (first * loads[0] + second * loads[1])[first + second <= count]
        if len(sums) * len(more) > MOST_SUMS:
            return None
        sums = np.unique(np.add.outer(sums, more).ravel())
    return sums
