"""The cuts that a layered problem allows on a placement, in parts that are never cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, product
from operator import ge
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import CUT_MEMORY, MEMORY_TOLERANCE
from zbv_solver.problem.stages import Placement

Boundaries = tuple[int, ...]
"""(S+1,) boundaries of stages: stage s has the parts ``[bounds[s], bounds[s + 1])``."""


@dataclass(frozen=True)
class ScoredCut:
    """A cut and its value, of which less is better.

    The value is the load of the most loaded rank, the most that a rank needs beyond its room, or an estimate
    of the objective: the function that made it says which.
    """

    cut: Cut
    value: float
    bound: float = -np.inf
    """A lower bound on the value of all cuts."""
    name: str = ""
    """The method that made the cut."""


MOST_TRIED = 8
"""Most stages per rank for which all choices of recomputed stages are tried."""


@dataclass(frozen=True, eq=False)
class CutSpace:
    """The cuts of a layered problem on one placement, with its tables."""

    problem: LayeredProblem
    placement: Placement
    tables: CutTables

    @property
    def n_stages(self) -> int:
        """Number of stages S."""
        return self.placement.n_stages

    @property
    def least(self) -> int:
        """Fewest parts of a stage."""
        return 0 if self.problem.rules.allow_empty else 1

    @cached_property
    def ranges(self) -> tuple[IntArray, IntArray]:
        """Smallest and largest value of every boundary, (S+1,) each."""
        fixed = self.problem.rules.fixed_bounds(self.problem.model, self.n_stages) or {}
        number = np.arange(self.n_stages + 1)
        lower = np.zeros(self.n_stages + 1, np.int64)
        upper = np.full(self.n_stages + 1, self.tables.n)
        for bound, place in fixed.items():
            at = int(np.searchsorted(self.problem.places, place))
            # Between a fixed boundary and another one, every stage has at least `least` parts.
            steps = self.least * (number - bound)
            lower = np.maximum(lower, np.where(number >= bound, at + steps, 0))
            upper = np.minimum(upper, np.where(number <= bound, at + steps, self.tables.n))
        return lower, upper

    def repaired(self, bounds: IntArray) -> Boundaries:
        """The nearest boundaries that the rules allow, from left to right."""
        lower, upper = self.ranges
        repaired = np.clip(bounds, lower, upper)
        for number in range(1, len(repaired)):
            repaired[number] = max(repaired[number], repaired[number - 1] + self.least)
        return tuple(map(int, np.minimum(repaired, upper)))

    def allows(self, bounds: Boundaries) -> bool:
        """Whether the rules allow these boundaries."""
        lower, upper = self.ranges
        inside = all(low <= bound <= high for low, bound, high in zip(lower, bounds, upper, strict=True))
        return inside and all(end - begin >= self.least for begin, end in pairwise(bounds))

    def cut(self, bounds: Boundaries, recompute: tuple[bool, ...]) -> Cut:
        """The cut of the model's layers at these boundaries."""
        return Cut.at(self.problem.places[list(bounds)], recompute)

    def bounds_of(self, cut: Cut) -> Boundaries:
        """The boundaries of a cut, in parts."""
        return tuple(map(int, np.searchsorted(self.problem.places, cut.bounds)))

    def load(self, bounds: Boundaries, rank: int, recompute: tuple[bool, ...]) -> float:
        """Work of a rank for one microbatch; ``recompute`` is one value per stage of the rank."""
        sums, total = self.tables.sums[self.tables.kind_of[rank]], 0.0
        for stage, variant in zip(self.placement.stages_of[rank], recompute, strict=True):
            forward, split, fused = (
                sums[int(variant), :3, bounds[stage + 1]] - sums[int(variant), :3, bounds[stage]]
            )
            total += float(forward + min(split, fused))
        return total

    def needs(self, bounds: Boundaries, rank: int, recompute: tuple[bool, ...]) -> float:
        """Least memory that a rank's layers need: that of one microbatch, static memory and workspace."""
        held, workspace, kind = 0.0, 0.0, self.tables.kind_of[rank]
        sums, largest = self.tables.sums[kind], self.tables.workspace[kind]
        for stage, variant in zip(self.placement.stages_of[rank], recompute, strict=True):
            begin, end, at = bounds[stage], bounds[stage + 1], int(variant)
            held += float(sums[at, 3, end] - sums[at, 3, begin])
            workspace = max(workspace, float(largest[at, begin, end]))
        return held + workspace

    def fitting(self, bounds: Boundaries, with_these: tuple[bool, ...] = ()) -> Cut | None:
        """The cut that recomputes so that every rank fits with the least work; None if one cannot fit.

        The stages of ``with_these`` (S,) are always recomputed.
        """
        chosen = []
        for rank, stages in enumerate(self.placement.stages_of):
            kept = [with_these[stage] for stage in stages] if with_these else [False] * len(stages)
            fitting = [
                variant
                for variant in self._variants(len(stages))
                if all(map(ge, variant, kept)) and self.needs(bounds, rank, variant) <= self.tables.room[rank]
            ]
            if not fitting:
                return None
            chosen.append(min(fitting, key=lambda variant: self.load(bounds, rank, variant)))
        return self.cut(bounds, self._by_stage(chosen))

    def leanest(self, bounds: Boundaries) -> Cut:
        """The cut that recomputes so that every rank needs the least memory."""
        chosen = []
        for rank, stages in enumerate(self.placement.stages_of):
            variants = self._variants(len(stages))
            chosen.append(min(variants, key=lambda variant: self.needs(bounds, rank, variant)))
        return self.cut(bounds, self._by_stage(chosen))

    def excess(self, cut: Cut) -> float:
        """Largest excess of any rank's need over its room; at most 0 if every rank fits."""
        bounds, by_rank = self.bounds_of(cut), enumerate(self._by_rank(cut))
        return max(
            self.needs(bounds, rank, variant) - float(self.tables.room[rank]) for rank, variant in by_rank
        )

    def worst_load(self, cut: Cut) -> float:
        """Work of the most loaded rank for one microbatch."""
        bounds, by_rank = self.bounds_of(cut), enumerate(self._by_rank(cut))
        return max(self.load(bounds, rank, variant) for rank, variant in by_rank)

    def _by_rank(self, cut: Cut) -> list[tuple[bool, ...]]:
        """Which of its stages every rank recomputes."""
        return [tuple(cut.recompute[stage] for stage in stages) for stages in self.placement.stages_of]

    def _by_stage(self, by_rank: list[tuple[bool, ...]]) -> tuple[bool, ...]:
        """The inverse of :meth:`_by_rank`, (S,)."""
        variant_of = dict(zip(chain(*self.placement.stages_of), chain(*by_rank), strict=True))
        return tuple(variant_of[stage] for stage in range(self.n_stages))

    def _variants(self, chunks: int) -> list[tuple[bool, ...]]:
        """The choices of recomputed stages of a rank that are tried, fewest stages first."""
        if self.tables.variants == 1:
            return [(False,) * chunks]
        # There are 2^chunks choices. With many chunks, only prefixes are tried.
        if chunks > MOST_TRIED:
            return [tuple(chunk < count for chunk in range(chunks)) for count in range(chunks + 1)]
        return sorted(product((False, True), repeat=chunks), key=sum)


LOAD, EXCESS = 0, 1
"""What kernels minimise: the load of the most loaded rank of cuts that fit, or the largest memory excess."""


class CutTables(NamedTuple):
    """Costs and memory of a stage with the parts [i, j), plain (variant 0) or recomputed (variant 1).

    The first axis of the tables is the kind of device, one of K. Compiled kernels take the whole tuple.
    """

    sums: FloatArray
    """(K, 2, 4, n+1) prefix sums over n parts: F, I + W, B, and memory held by F and statically."""
    held: FloatArray
    """(K, 2, n+1) prefix sums of the memory held by F alone."""
    workspace: FloatArray
    """(K, 2, n+1, n+1): [i, j] is the largest workspace of the parts [i, j)."""
    cheapest: FloatArray
    """(n+1,) prefix sums of the least cost of every part by itself, over the kinds of the cost times
    speed."""
    room: FloatArray
    """(p,) memory of every rank for its layers: limit - static, plus the tolerance; inf without a limit."""
    most_room: FloatArray
    """(p,) the same with the verifier's larger tolerance: lower bounds must hold for every plan that the
    verifier accepts."""
    variants: int
    """1, or 2 when a layer can be recomputed."""
    kind_of: IntArray
    speeds: FloatArray
    """(p,) kind of every rank, and its speed: at most 1, which is that of the fastest kind. A rank's load
    is at least what `cheapest` says of its parts, divided by its speed."""

    @property
    def n(self) -> int:
        """Number of parts."""
        return int(self.sums.shape[-1]) - 1

    @classmethod
    def of(cls, problem: LayeredProblem) -> CutTables:
        """The tables of a problem."""
        layers, places = layer_table(problem), problem.places
        forward, inputs, weights, fused, held, _, static, _ = np.moveaxis(layers, 2, 0)
        summed = np.stack([forward, inputs + weights, fused, held + static, held], axis=2)
        sums = np.zeros((*summed.shape[:3], problem.model.n_layers + 1))
        np.cumsum(summed, axis=3, out=sums[..., 1:])
        sums = sums[..., places]
        largest = np.maximum.reduceat(layers[:, :, 7], places[:-1], axis=2)
        workspace = np.zeros((*largest.shape[:2], len(places), len(places)))
        for begin in range(len(places) - 1):
            workspace[:, :, begin, begin + 1 :] = np.maximum.accumulate(largest[:, :, begin:], axis=2)
        p = problem.pp_degree
        room = most_room = np.full(p, np.inf)
        if problem.limit is not None:
            limit = np.array(problem.limit)
            free = limit - np.array(problem.static)
            room, most_room = free + CUT_MEMORY * limit, free + 2 * MEMORY_TOLERANCE * limit
        each = least_costs(layers)
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


def layer_table(problem: LayeredProblem, others: frozenset[str] = frozenset()) -> FloatArray:
    """(K, 2, 8, layers), plain and recomputed: what a layer takes and holds, copies counted.

    F, I, W and B; memory held after F, between I and W, and statically; workspace. The layers with the names
    of ``others`` are never recomputed.
    """
    table = np.zeros((len(problem.kinds), 2, 8, problem.model.n_layers))
    for kind, device in enumerate(problem.kinds):
        for place, (name, layer) in enumerate(zip(problem.model.names, problem.model.each, strict=True)):
            for variant in (0, 1):
                costs = layer.costs_when(variant == 1 and name not in others, device)
                memory = costs.memory
                table[kind, variant, :, place] = (
                    *(costs.forward, costs.backward_input, costs.backward_weight, costs.fused),
                    *(memory.forward, max(0.0, memory.forward + memory.backward_input), memory.static),
                    memory.workspace,
                )
    return table


def least_costs(layers: FloatArray) -> FloatArray:
    """(K, layers) the least cost of every layer by itself, from a :func:`layer_table`.

    A sum of minima is at most the minimum of sums, so sums of these are lower bounds on the cost of a stage.
    """
    forward, inputs, weights, fused = np.moveaxis(layers[:, :, :4], 2, 0)
    least: FloatArray = (forward + np.minimum(inputs + weights, fused)).min(axis=1)
    return least


def speeds_of(totals: FloatArray) -> FloatArray:
    """(K,) speeds of the kinds by the cost of the whole model. Any others would give valid bounds, too."""
    return totals.min() / totals if totals.min() > 0 else np.ones(len(totals))
