"""Cuts as counts: how many parts of every run of equal parts lie before every boundary.

The parts of a model repeat: a run of equal blocks between an embedding and a head. The costs, the memory and
the latencies of a cut's stages are linear in the counts, for whole cuts and for fractions of parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.partition.cut_space import Boundaries, CutSpace, layer_table
from zbv_solver.partition.fixed_order import FixedOrder, Terms
from zbv_solver.problem.layer import Layer, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MAX_LAYERS
from zbv_solver.problem.problem import B, F, I

WHOLE = MAX_LAYERS
"""More layers than any stage has: all of them are recomputed."""
Recomputed = tuple[int, ...]
"""(S,) how many layers of every stage are recomputed: its first ones that can be."""
Choice = tuple[Boundaries, Recomputed]
"""A cut: boundaries in parts (S+1,), and what is recomputed."""


@dataclass(frozen=True)
class First:
    """As many first layers of every stage are recomputed: from ``least`` to ``most``, one number for all.

    Megatron-LM: ``--recompute-method block`` (``megatron/core/recompute.py``, ``checkpointed_forward``).
    """

    least: int = 0
    most: int = WHOLE
    others: frozenset[str] = frozenset()
    """Names of layers that are never recomputed."""

    def model(self, problem: LayeredProblem, bounds: Boundaries, count: int) -> Model:
        """The layers of a cut with these boundaries in parts: ``count`` first parts are recomputed.

        Recomputed layers have the costs of recomputation as their own, and no layer has others.
        """
        model, layers = problem.model, list[Layer]()
        for begin, end in pairwise(bounds):
            left = count
            for places in pairwise(problem.places[begin : end + 1].tolist()):
                part = [*zip(model.names[slice(*places)], model.each[slice(*places)], strict=True)]
                is_again = left > 0 and any(self.can_recompute(*each) for each in part)
                left -= is_again
                for name, layer in part:
                    costs = layer.costs_when(is_again and self.can_recompute(name, layer))
                    layers.append(replace(layer, name=name, costs=costs, recompute=None, repeat=None, on=()))
        return Model(tuple(layers))

    def can_recompute(self, name: str, layer: Layer) -> bool:
        """Whether a layer may be recomputed."""
        return layer.recompute is not None and name not in self.others


@dataclass(frozen=True)
class Groups:
    """All layers of every stage are recomputed, in groups of ``size``; the last one has what is left.

    A group keeps only the input of its first layer, and its backward begins with the forward of all its
    layers. So there are at once what these hold without recomputation, and the workspace of one of them. A
    stage's groups all count like groups of its largest layer. The time is that of single layers.

    Megatron-LM: ``--recompute-method uniform`` (``megatron/core/recompute.py``, ``checkpointed_forward``).
    """

    size: int

    def model(self, problem: LayeredProblem, bounds: Boundaries) -> Model:
        """The layers of a cut with these boundaries in parts.

        Recomputed layers have the costs of groups as their own, and no layer has others.
        """
        model, layers = problem.model, list[Layer]()
        for begin, end in pairwise(bounds):
            parts = [model.each[slice(*at)] for at in pairwise(problem.places[begin : end + 1].tolist())]
            able = [any(layer.recompute is not None for layer in part) for part in parts]
            others, done = min(self.size, sum(able)) - 1, 0
            for part, is_again in zip(parts, able, strict=True):
                is_first = done % self.size == 0
                done += is_again
                held = sum(each.costs.memory.forward for each in part if each.recompute is not None)
                for layer in part:
                    costs = layer.costs_when(is_again)
                    memory = costs.memory
                    if is_again:
                        memory = replace(memory, workspace=memory.workspace + others * held)
                    if layer.recompute is not None and not is_first:
                        memory = replace(memory, forward=0.0, backward_input=0.0, backward_weight=0.0)
                    costs = replace(costs, memory=memory)
                    layers.append(replace(layer, costs=costs, recompute=None, repeat=None, on=()))
        named = zip(layers, model.names, strict=True)
        return Model(tuple(replace(layer, name=name) for layer, name in named))


class Row(NamedTuple):
    """``fixed + slope · counts + again · recomputed``, with counts (S+1, R) and recomputed (S, R)."""

    fixed: float
    slope: FloatArray
    again: FloatArray

    def scaled(self, by: float) -> Row:
        """The row times a number."""
        return Row(self.fixed * by, self.slope * by, self.again * by)

    def with_stages(self, recompute: Recomputed) -> FloatArray:
        """The slopes (S+1, R) when stages are recomputed as a whole or not at all."""
        chosen = np.array(recompute, dtype=bool)[:, None] * self.again
        slope = self.slope.copy()
        slope[1:] += chosen
        slope[:-1] -= chosen
        return slope


@dataclass(frozen=True, eq=False)
class Runs:
    """The R runs of equal parts of a space, and the costs of one part of each."""

    space: CutSpace
    begin: IntArray
    """(R+1,) first part of every run, and the number of parts."""
    duration: FloatArray
    """(2, 4, R) of F, I, W and B, plain and recomputed."""
    memory: FloatArray
    """(2, 3, R): held after F, held between I and W, and static."""
    workspace: FloatArray
    """(2, R)."""
    can_recompute: FloatArray
    """(R,) 1 for parts that can be recomputed, 0 for others."""
    first_transfer: float
    transfer: FloatArray
    """Latency of a boundary before all parts, and by how much one part (R,) changes it."""
    least: int
    lower: IntArray
    upper: IntArray
    """Fewest parts of a stage, and the ranges (S+1,) of boundaries."""
    sizes: dict[int, int] = field(default_factory=dict)
    """The prescribed number of parts of some stages."""

    @property
    def size(self) -> IntArray:
        """(R,) number of parts of every run."""
        return np.diff(self.begin)

    @cached_property
    def remote(self) -> FloatArray:
        """(S-1,) 1 for a boundary between ranks, 0 for one inside a rank."""
        placement = self.space.placement
        local = [placement.is_local(boundary) for boundary in range(placement.n_stages - 1)]
        return 1.0 - np.array(local, dtype=np.float64)

    @classmethod
    def of(
        cls,
        space: CutSpace,
        latest: dict[int, int] | None = None,
        sizes: dict[int, int] | None = None,
        others: frozenset[str] = frozenset(),
    ) -> Runs:
        """The runs of a space.

        Parameters
        ----------
        latest
            The last allowed place of some boundaries, in parts.
        sizes
            The prescribed number of parts of some stages.
        others
            Names of layers that are never recomputed.
        """
        problem, names = space.problem, space.problem.model.names
        places = problem.places
        (table,) = layer_table(problem, others)  # ranks are equal
        parts = np.add.reduceat(table[:, :7], places[:-1], axis=2)
        largest = np.maximum.reduceat(table[:, 7], places[:-1], axis=1)
        layers = zip(names, problem.model.each, strict=True)
        can_recompute = [float(layer.recompute is not None and name not in others) for name, layer in layers]
        able = np.maximum.reduceat(can_recompute, places[:-1])
        transfers = np.array([problem.transfer(int(place)) for place in places])
        steps = np.diff(transfers)
        columns = np.concatenate([parts.reshape(14, -1), largest, able[None], steps[None]])
        differs = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        starts = np.append(0, np.flatnonzero(differs) + 1)
        lower, upper = (limit.copy() for limit in space.ranges)
        # The first and the last stage have the input and the loss, even if others may be empty.
        lower[1:], upper[:-1] = np.maximum(lower[1:], 1), np.minimum(upper[:-1], len(places) - 2)
        for boundary, place in (latest or {}).items():
            before = place - space.least * np.arange(boundary, -1, -1)
            upper[: boundary + 1] = np.minimum(upper[: boundary + 1], before)
        _narrow(lower, upper, space.least, sizes or {})
        return cls(
            space,
            np.append(starts, len(places) - 1),
            parts[:, :4, starts],
            parts[:, 4:, starts],
            largest[:, starts],
            able[starts],
            float(transfers[0]),
            steps[starts],
            space.least,
            lower,
            upper,
            sizes or {},
        )

    @property
    def allow_none(self) -> bool:
        """Whether no boundaries are allowed: too few layers for a first and a last stage, or for sizes."""
        return bool((self.lower > self.upper).any())

    def allows(self, bounds: Boundaries) -> bool:
        """Whether boundaries are allowed."""
        at = np.array(bounds)
        inside = bool(((self.lower <= at) & (at <= self.upper)).all())
        has_sizes = all(at[stage + 1] - at[stage] == size for stage, size in self.sizes.items())
        return inside and has_sizes and int(np.diff(at).min()) >= self.least

    def repaired(self, bounds: Boundaries) -> Boundaries | None:
        """The nearest allowed boundaries, from left to right; None if none are found."""
        at = np.clip(np.array(bounds), self.lower, self.upper)
        for number in range(1, len(at)):
            size = self.sizes.get(number - 1)
            at[number] = (
                max(at[number], at[number - 1] + self.least) if size is None else at[number - 1] + size
            )
        found = tuple(map(int, np.minimum(at, self.upper)))
        return found if self.allows(found) else None

    def counts(self, bounds: Boundaries) -> FloatArray:
        """(S+1, R) the parts of every run before every boundary."""
        found: FloatArray = np.clip(np.array(bounds)[:, None] - self.begin[:-1], 0.0, self.size)
        return found

    def again(self, counts: FloatArray, recompute: Recomputed) -> FloatArray:
        """(S, R) how many parts of every run a stage recomputes."""
        able = np.maximum(np.diff(counts, axis=0), 0.0) * self.can_recompute
        before = np.cumsum(able, axis=1) - able
        found: FloatArray = np.clip(np.array(recompute)[:, None] - before, 0.0, able)
        return found

    def costs(self, counts: FloatArray, again: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Durations (4, S) and latencies (S-1,) of stages, of which ``again`` (S, R) is recomputed."""
        inside = np.maximum(np.diff(counts, axis=0), 0.0)
        duration = self.duration[0] @ (inside - again).T + self.duration[1] @ again.T
        latency = self.remote * (self.first_transfer + counts[1:-1] @ self.transfer)
        if self.space.problem.blocking:
            duration[F, :-1] += latency
            duration[[I, B], 1:] += latency
            latency = np.zeros_like(latency)
        return duration, latency

    def value(self, order: FixedOrder, choice: Choice) -> float:
        """The objective of a cut."""
        counts = self.counts(choice[0])
        return order.value(*self.costs(counts, self.again(counts, choice[1])))

    def peaks(self, order: FixedOrder, choice: Choice) -> FloatArray:
        """(p,) the largest memory of every rank."""
        counts = self.counts(choice[0])
        again = self.again(counts, choice[1])
        plain = np.diff(counts, axis=0) - again
        amounts = self.memory[0] @ plain.T + self.memory[1] @ again.T
        ranks, numbers = order.held
        held = np.einsum("hkc,khc->h", numbers, amounts[:2][:, order.hosted[ranks]])
        peaks = np.zeros(len(order.hosted))
        np.maximum.at(peaks, ranks, held)
        variants = [
            np.where(held > 0, own, 0.0) for held, own in zip((plain, again), self.workspace, strict=True)
        ]
        spaces = np.maximum(*variants).max(axis=1)
        static = np.array(self.space.problem.static) + amounts[2][order.hosted].sum(axis=1)
        needs: FloatArray = peaks + static + spaces[order.hosted].max(axis=1)
        return needs

    def most_room(self, order: FixedOrder, recompute: Recomputed | None) -> FloatArray:
        """(p,) memory of every rank for its parts, without the least workspace; inf without a limit.

        The rank of the first stage has the first part, and that of the last stage the last one.
        """
        whole = self.space.tables.most_room
        room: FloatArray = whole.copy()
        for stage, run in ((0, 0), (len(self.lower) - 2, -1)):
            spaces = self.workspace[:, run]
            least = float(spaces.min() if recompute is None else spaces[int(bool(recompute[stage]))])
            rank = int(np.flatnonzero((order.hosted == stage).any(axis=1))[0])
            room[rank] = min(room[rank], whole[rank] - least)
        return room

    def row_of_terms(self, terms: Terms) -> Row:
        """Terms of the order as a row."""
        slope = np.zeros((len(self.lower), len(self.size)))
        crossed = terms.transfers
        if self.space.problem.blocking:
            crossed = terms.count[F, :-1] + terms.count[I, 1:] + terms.count[B, 1:]
        slope[1:-1] += (crossed * self.remote)[:, None] * self.transfer
        fixed = float(crossed @ self.remote) * self.first_transfer
        return self._row(fixed, slope, np.arange(len(self.lower) - 1), terms.count, self.duration)

    def row_of_memory(self, stages: IntArray, numbers: FloatArray) -> Row:
        """What a rank holds, without workspace, as a row; ``numbers`` (2, chunks) are microbatches."""
        weight = np.concatenate([numbers, np.ones((1, len(stages)))])
        slope = np.zeros((len(self.lower), len(self.size)))
        return self._row(0.0, slope, stages, weight, self.memory)

    def _row(
        self, fixed: float, slope: FloatArray, stages: IntArray, weight: FloatArray, of: FloatArray
    ) -> Row:
        """Add to a row what the given stages, all different, weigh; ``weight`` has a column for each."""
        again = np.zeros((len(self.lower) - 1, len(self.size)))
        plain, recomputed = weight.T @ of[0], weight.T @ of[1]
        slope[stages + 1] += plain
        slope[stages] -= plain
        again[stages] += recomputed - plain
        return Row(fixed, slope, again)


def _narrow(lower: IntArray, upper: IntArray, least: int, sizes: dict[int, int]) -> None:
    """Narrow the ranges of boundaries to what the sizes of stages leave."""
    stages = range(len(lower) - 1)
    for stage in stages if sizes else ():
        fewest, most = sizes.get(stage, least), sizes.get(stage, int(upper[-1]))
        lower[stage + 1] = max(lower[stage + 1], lower[stage] + fewest)
        upper[stage + 1] = min(upper[stage + 1], upper[stage] + most)
    for stage in reversed(stages) if sizes else ():
        fewest, most = sizes.get(stage, least), sizes.get(stage, int(upper[-1]))
        lower[stage] = max(lower[stage], lower[stage + 1] - most)
        upper[stage] = min(upper[stage], upper[stage + 1] - fewest)
