"""The work that a rank can have done before a time in the memory that is free: a fractional knapsack."""

from __future__ import annotations

import numpy as np

from zbv_solver.bounds.directions import HELD, HELD_BY_REST, REST_BEFORE, UP
from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.kernels.jit import compiled_leaf


@compiled_leaf
def knapsack(
    work: FloatArray,
    memory: FloatArray,
    free: float,
    ready: IntArray,
    ups: IntArray,
    rests: IntArray,
    scratch: FloatArray,
) -> float:  # pragma: no cover - compiled
    """Most work of up operations and rests that fits the free memory: Lemma 15 (c).

    The knapsack is fractional, so this is at least the true maximum. Per chunk there are at most ``rests``
    rests and min(``ready``, ``ups``) up operations, each with its rest. Where the up operation does more work
    per memory, it is packed together with its rest; otherwise rests are packed first. Either way a chunk's
    work is concave in its memory, so packing the densest piece of all chunks first is optimal.
    """
    chunks = work.shape[1]
    length, size = scratch[0], scratch[1]
    total, wanted, free = 0.0, 0.0, max(0.0, free)  # with less than none, no order exists: any bound is right
    for j in range(chunks):
        # Pieces 2j and 2j + 1 are the work and the memory of chunk j, the denser one first.
        n = min(ready[j], ups[j])
        every = max(n, rests[j])
        up, rest = work[UP, j], work[REST_BEFORE, j]
        small = memory[HELD_BY_REST, j]
        large = memory[HELD, j] - small
        # Compare the densities by products, because amounts may be 0. If the up operation is at least as
        # dense as a rest, so are both together (mediant).
        if up * small >= rest * large:
            length[2 * j], size[2 * j] = n * (up + rest), n * (small + large)
            length[2 * j + 1], size[2 * j + 1] = (every - n) * rest, (every - n) * small
        else:
            length[2 * j], size[2 * j] = every * rest, every * small
            length[2 * j + 1], size[2 * j + 1] = n * up, n * large
        total += length[2 * j] + length[2 * j + 1]
        wanted += size[2 * j] + size[2 * j + 1]
    if wanted <= free:
        return total
    total = 0.0
    for _ in range(2 * chunks):
        densest, best = -1.0, -1
        for i in range(2 * chunks):
            density = length[i] / size[i] if size[i] > 0 else np.inf
            if length[i] > 0 and density > densest:
                densest, best = density, i
        # A piece that does not fit whole is taken in part: the optimum of the fractional knapsack.
        if best < 0 or size[best] > free:
            return total + free * densest if best >= 0 else total
        total += length[best]
        free -= size[best]
        length[best] = 0.0
    return total
