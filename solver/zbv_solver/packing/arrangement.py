"""Which sequences form a microbatch, and which replica runs it.

The *estimate* of an arrangement is the estimate of its slowest replica, because all replicas wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.packing.step_costs import StepCosts, moments

Replicas = tuple[tuple[tuple[int, ...], ...], ...]
"""Indices of sequences, by replica and microbatch."""


class Microbatch(NamedTuple):
    """Sequences that run together.

    Attributes
    ----------
    contents
        Indices of its sequences.
    squares
        Sum of their squared lengths.
    moments
        (6,), see :mod:`.step_costs`.
    path
        Its longest path.
    """

    contents: tuple[int, ...]
    tokens: int
    squares: int
    moments: FloatArray
    path: float


@dataclass(frozen=True, eq=False)
class Packer:
    """What an arrangement is made of: the batch's sequences, and the costs and capacity of microbatches.

    Attributes
    ----------
    lengths
        Of the batch's sequences, in tokens.
    capacity
        Most tokens of a microbatch with more than one sequence.
    replicas
        Number of replicas.
    """

    costs: StepCosts
    lengths: tuple[int, ...]
    capacity: int
    replicas: int

    def microbatch(self, contents: Iterable[int]) -> Microbatch:
        """The microbatch of these sequences."""
        chosen = tuple(contents)
        own = moments(self.lengths[index] for index in chosen)
        return Microbatch(chosen, int(own[1]), int(own[2]), own, float(self.costs.longest_path @ own))

    def fits(self, tokens: int, squares: int) -> bool:
        """Whether several sequences of this size may form a microbatch."""
        return tokens <= self.capacity and self.costs.fits(tokens, squares)

    def fits_all(self, contents: Sequence[int]) -> bool:
        """Whether these sequences may form a microbatch."""
        lengths = [self.lengths[index] for index in contents]
        return len(lengths) == 1 or self.fits(sum(lengths), sum(length * length for length in lengths))

    def work(self, contents: Iterable[int]) -> float:
        """The work of the busiest rank for these sequences together."""
        lengths = [self.lengths[index] for index in contents]
        return self.costs.work(sum(lengths), sum(length * length for length in lengths))

    def estimate(self, microbatches: Sequence[Microbatch]) -> float:
        """The estimate of a replica's step."""
        total = np.sum([each.moments for each in microbatches], axis=0)
        return self.of_sum(total, max(each.path for each in microbatches))

    def of_sum(self, total: FloatArray, path: float) -> float:
        """The estimate for a sum of moments and the longest path."""
        return max(float((self.costs.rates @ total).max()), path)

    def distributed(self, contents: Iterable[Sequence[int]]) -> list[list[Microbatch]]:
        """Microbatches on replicas: each of the largest remaining on the replica with the smallest estimate.

        List scheduling with the longest first (Graham 1969).
        """
        made = [self.microbatch(each) for each in contents]
        made.sort(key=lambda each: (-self.of_sum(each.moments, each.path), each.contents))
        replicas: list[list[Microbatch]] = [[] for _ in range(self.replicas)]
        estimates = [0.0] * self.replicas
        for each in made:
            chosen = min(range(self.replicas), key=lambda at: (estimates[at], len(replicas[at]), at))
            replicas[chosen].append(each)
            estimates[chosen] = self.estimate(replicas[chosen])
        return replicas


def contents_of(replicas: Iterable[Iterable[Microbatch]]) -> Replicas:
    """The indices only."""
    return tuple(tuple(each.contents for each in microbatches) for microbatches in replicas)
