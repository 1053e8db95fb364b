"""A layered problem as arrays over its parts, for sums over any stage in constant time.

A *part* is a run of layers that is never cut: one layer, or layers that `cut.together` keeps in one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.arrays import FloatArray, IntArray
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import CUT_MEMORY, MEMORY_TOLERANCE

LOAD, EXCESS = 0, 1
"""What kernels minimise: the load of the most loaded rank of cuts that fit, or the largest memory excess."""


class KernelTables(NamedTuple):
    """The fields of :class:`CutTables` that compiled kernels take."""

    sums: FloatArray
    workspace: FloatArray
    cheapest: FloatArray
    room: FloatArray
    variants: int
    kind_of: IntArray
    speeds: FloatArray


@dataclass(frozen=True, eq=False)
class CutTables:
    """Costs and memory of a stage with the parts [i, j), plain (variant 0) or recomputed (variant 1).

    The first axis of the tables is the kind of device, one of K.

    Attributes
    ----------
    sums
        (K, 2, 4, n+1) prefix sums over n parts: F, I + W, B, and memory held by F and statically.
    held
        (K, 2, n+1) prefix sums of the memory held by F alone.
    workspace
        (K, 2, n+1, n+1): [i, j] is the largest workspace of the parts [i, j).
    cheapest
        (n+1,) prefix sums of the least cost of every part by itself, over the kinds of the cost times speed.
    kind_of, speeds
        (p,) kind of every rank, and its speed: at most 1, which is that of the fastest kind. A rank's load is
        at least what `cheapest` says of its parts, divided by its speed.
    room
        (p,) memory of every rank for its layers: limit - static, plus the tolerance; inf without a limit.
    most_room
        (p,) the same with the verifier's larger tolerance: lower bounds must hold for every plan that the
        verifier accepts.
    variants
        1, or 2 when a layer can be recomputed.
    """

    sums: FloatArray
    held: FloatArray
    workspace: FloatArray
    cheapest: FloatArray
    room: FloatArray
    most_room: FloatArray
    variants: int
    kind_of: IntArray
    speeds: FloatArray

    @property
    def n(self) -> int:
        """Number of parts."""
        return int(self.sums.shape[-1]) - 1

    def for_kernels(self) -> KernelTables:
        """The tables as kernels take them."""
        return KernelTables(
            self.sums,
            self.workspace,
            self.cheapest,
            self.room,
            self.variants,
            self.kind_of,
            self.speeds,
        )

    @classmethod
    def of(cls, problem: LayeredProblem) -> CutTables:
        """The tables of a problem."""
        per_layer, places = _per_layer(problem), problem.places
        kinds, n = len(problem.kinds), problem.model.n_layers
        sums = np.zeros((kinds, 2, 5, n + 1))
        np.cumsum(per_layer[:, :, :5], axis=3, out=sums[..., 1:])
        sums = sums[..., places]
        largest = np.maximum.reduceat(per_layer[:, :, 5], places[:-1], axis=2)
        workspace = np.zeros((kinds, 2, len(places), len(places)))
        for begin in range(len(places) - 1):
            workspace[:, :, begin, begin + 1 :] = np.maximum.accumulate(largest[:, :, begin:], axis=2)
        p = problem.pp_degree
        room = most_room = np.full(p, np.inf)
        if problem.limit is not None:
            limit = np.array(problem.limit)
            room = limit - np.array(problem.static) + CUT_MEMORY * limit
            most_room = limit - np.array(problem.static) + 2 * MEMORY_TOLERANCE * limit
        backward = np.minimum(per_layer[:, :, 1], per_layer[:, :, 2])
        # The minimum is taken per layer. A sum of minima is at most the minimum of sums, so differences of
        # `cheapest` are lower bounds on the cost of any stage.
        each = (per_layer[:, :, 0] + backward).min(axis=1)
        speeds = speeds_of(each.sum(axis=1))
        cheapest = np.concatenate(([0.0], np.cumsum((each * speeds[:, None]).min(axis=0))))[places]
        kind_of = np.array(problem.kind_of)
        return cls(
            sums=np.ascontiguousarray(sums[:, :, :4]),
            held=sums[:, :, 4].copy(),
            workspace=workspace,
            cheapest=cheapest,
            room=room,
            most_room=most_room,
            variants=2 if problem.model.can_recompute else 1,
            kind_of=kind_of,
            speeds=speeds[kind_of],
        )


def _per_layer(problem: LayeredProblem) -> FloatArray:
    """(K, 2, 6, layers): F, I + W, B, memory held by F and statically, that held by F alone, workspace."""
    found = np.zeros((len(problem.kinds), 2, 6, problem.model.n_layers))
    for kind, device in enumerate(problem.kinds):
        for place, layer in enumerate(problem.model.each):
            for variant in (0, 1):
                costs = layer.costs_when(variant == 1, device)
                memory = costs.memory
                found[kind, variant, :, place] = (
                    costs.forward,
                    costs.split,
                    costs.fused,
                    memory.forward + memory.static,
                    memory.forward,
                    memory.workspace,
                )
    return found


def speeds_of(totals: FloatArray) -> FloatArray:
    """(K,) speeds of the kinds by the cost of the whole model. Any others would give valid bounds, too."""
    return totals.min() / totals if totals.min() > 0 else np.ones(len(totals))
