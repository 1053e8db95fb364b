"""A lower bound of the step over all packings of a batch."""

from __future__ import annotations

from math import ceil

import numpy as np

from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.packing.arrangement import Packer
from zbv_solver.packing.step_costs import MOMENTS, moments


def packing_bound(packer: Packer) -> float:
    """The step of every packing and plan is at least this: Lemma 42.

    The largest of three: the sums of all sequences, divided by the replicas; the sums of those long sequences
    of which one replica must run several (pigeonhole); and the path of the longest sequence.
    """
    lengths = sorted(packer.lengths, reverse=True)
    each = np.array([moments([length]) for length in lengths])
    fewest = max(packer.replicas, ceil(sum(lengths) / packer.capacity))
    total = each.sum(axis=0)
    total[0] = fewest
    bounds = [total / packer.replicas, *_several(each, packer.replicas)]
    path = float(each[0] @ packer.costs.longest_path)
    return max(path, float((np.array(bounds) @ packer.costs.rates.T).max()))


def _several(each: FloatArray, replicas: int) -> list[FloatArray]:
    """Sums of the moments of k + 1 sequences: the shortest of the longest k · replicas + 1, for every k."""
    sums = np.concatenate([np.zeros((1, MOMENTS)), np.cumsum(each, axis=0)])
    found: list[FloatArray] = []
    for k in range((len(each) - 1) // replicas + 1):
        last = k * replicas + 1
        together = sums[last] - sums[last - k - 1]
        together[0] = 1.0
        found.append(together)
    return found
