"""A layered problem as arrays over the parts that are never cut: sums of any stage in constant time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import CUT_MEMORY, MEMORY_TOLERANCE

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CutTables:
    """What a stage of the parts from i to before j costs and holds, as it is (0) or recomputed (1).

    Attributes
    ----------
    sums
        (2, 4, n+1) running sums over n parts: F, I + W, B, and memory held by F and statically.
    held
        (2, n+1) running sums of the memory held by F alone.
    workspace
        (2, n+1, n+1): [i, j] is the largest workspace of the parts from i to before j.
    cheapest
        (n+1,) running sums of the least that the parts can cost, each by itself.
    room
        (p,) memory of every rank for its layers: limit - static, and what comparisons tolerate; inf
        where there is no limit.
    most_room
        (p,) the same for bounds, which must hold for whatever the verifier accepts: more than ``room``.
    variants
        1, or 2 where something can be recomputed.
    """

    sums: FloatArray
    held: FloatArray
    workspace: FloatArray
    cheapest: FloatArray
    room: FloatArray
    most_room: FloatArray
    variants: int

    @property
    def n(self) -> int:
        """Number of parts."""
        return int(self.sums.shape[2]) - 1

    @classmethod
    def of(cls, problem: LayeredProblem) -> CutTables:
        """The tables of a problem."""
        n = problem.model.n_layers
        per_layer = np.zeros((2, 6, n))
        for place, layer in enumerate(problem.model.each):
            for variant in (0, 1):
                costs = layer.costs_when(variant == 1)
                memory = costs.memory
                per_layer[variant, :, place] = (
                    costs.forward,
                    costs.split,
                    costs.fused,
                    memory.forward + memory.static,
                    memory.forward,
                    memory.workspace,
                )
        sums = np.zeros((2, 5, n + 1))
        np.cumsum(per_layer[:, :5], axis=2, out=sums[:, :, 1:])
        places = problem.places
        sums = sums[:, :, places]
        largest = np.maximum.reduceat(per_layer[:, 5], places[:-1], axis=1)
        workspace = np.zeros((2, len(places), len(places)))
        for begin in range(len(places) - 1):
            workspace[:, begin, begin + 1 :] = np.maximum.accumulate(largest[:, begin:], axis=1)
        p = problem.pp_degree
        room = most_room = np.full(p, np.inf)
        if problem.limit is not None:
            limit = np.array(problem.limit)
            room = limit - np.array(problem.static) + CUT_MEMORY * limit
            most_room = limit - np.array(problem.static) + 2 * MEMORY_TOLERANCE * limit
        backward = np.minimum(per_layer[:, 1], per_layer[:, 2])
        each = np.minimum(*(per_layer[:, 0] + backward))
        cheapest = np.concatenate(([0.0], np.cumsum(each)))[places]
        variants = 2 if problem.model.can_recompute else 1
        activations = sums[:, 4].copy()
        return cls(
            np.ascontiguousarray(sums[:, :4]), activations, workspace, cheapest, room, most_room, variants
        )
