"""The layers of one replica: costs and memory that do not depend on how many replicas there are.

Layouts that differ only in their replicas share them. The figures of a block are the sums of its halves'
figures, except for the workspace: that is the largest one, because a device runs one action at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from zbv_models.estimate.device import Device, GroupLinks
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import Kind, LayerKind, layer_kinds, shapes_of
from zbv_models.estimate.part import Part
from zbv_models.estimate.shapes import NONE, Degrees, PerAction, Shapes, Stream
from zbv_models.estimate.times import (
    OPERATIONS,
    TimeShares,
    accumulated_bytes,
    adding_time,
    compute_times,
    exchange_times,
    hidden_times,
    is_known,
    repeated_time,
    saved_bytes,
    saved_time,
)

NO_TIME = TimeShares()


@dataclass(frozen=True)
class Running:
    """Costs and memory of a layer, with or without recomputation."""

    times: PerAction
    """Microseconds of F, I and W."""
    after_forward: int
    after_input: int
    """Bytes that a microbatch holds after F and after I; after W it holds none."""
    workspace: int
    """Additional bytes while an action runs."""
    fused: float | None = None
    """Microseconds of B, which may be shorter than I and W, if it was measured; None for I + W."""
    hidden: PerAction = NONE
    """Of F and I, what the other action of a pair hides; B has as much as I."""
    pair_factor: float = 1.0
    """What the two actions of a pair cost each other, at least 1."""

    @property
    def shortest(self) -> PerAction:
        """The least that F, I and W add to a rank's time: with pairs, and with the shorter of I + W and B.

        :meth:`~zbv_solver.problem.layer.LayerCosts.with_communication_hidden` has the proof.
        """
        times, hidden = self.times, self.hidden

        def least(duration: float, of: float) -> float:
            return min(duration, self.pair_factor * (duration - of)) if of else duration

        forward = least(times.forward, hidden.forward)
        inputs, weights = least(times.backward_input, hidden.backward_input), times.backward_weight
        fused = inputs + weights if self.fused is None else least(self.fused, hidden.backward_input)
        if fused >= inputs + weights:
            return PerAction(forward, inputs, weights)
        both = min(inputs, fused)
        return PerAction(forward, both, fused - both)


Variants = tuple[Running, Running | None, Running | None]
"""Costs without, with full and with selective recomputation; None as in :class:`LayerEstimate`."""


def least_of(variants: Variants) -> float:
    """Least time of a microbatch, recomputed or not."""
    return min(running.shortest.total for running in variants if running is not None)


@dataclass(frozen=True)
class Inside:
    """What the time of a part depends on, besides its shapes."""

    device: Device
    links: GroupLinks
    """Those inside a stage of a replica."""
    modules: frozenset[str]
    """What selective recomputation repeats."""
    gradient_bytes: float
    fused_gradients: bool
    pairs: str
    """As in :class:`Training`."""


@dataclass(frozen=True)
class Computed:
    """A part, and what does not depend on other parts or on replicas."""

    part: Part
    times: PerAction
    """Compute and exchanges."""
    exchanged: PerAction
    """Of these, exchanges."""
    hidden: PerAction
    """Of these, what a pair hides."""
    shares: TimeShares
    dropped: int
    again: float
    """Bytes that selective recomputation drops, and how much longer I takes."""


@lru_cache(maxsize=8192)
def _computed(half: Kind, shapes: Shapes, inside: Inside) -> Computed:
    part, stream, device = half.part(shapes), shapes.stream, inside.device
    accumulated = accumulated_bytes(inside.gradient_bytes) if inside.fused_gradients else 0.0
    compute, shares = compute_times(part, stream, device, accumulated)
    exchanged, of_exchanges = exchange_times(part.exchanges, inside.links)
    added = NONE
    if not inside.fused_gradients:
        added = adding_time(part, inside.gradient_bytes, stream, device)
    dropped = part.dropped_bytes(inside.modules)
    again = repeated_time(part, inside.modules, stream, device, inside.links) if dropped else 0.0
    return Computed(
        part,
        compute + exchanged + added,
        exchanged,
        hidden_times(part.exchanges, inside.links, inside.pairs),
        shares + of_exchanges + TimeShares(memory_traffic=added.total),
        dropped,
        again,
    )


@dataclass(frozen=True)
class Unreplicated:
    """A layer of one replica: some parts."""

    name: str
    """That of a half; empty for a whole layer."""
    kind: LayerKind
    parts: tuple[Computed, ...]
    stream: Stream
    inside: Inside
    is_half: bool

    @cached_property
    def alone(self) -> Variants:
        """Its costs without replicas, which most layouts have."""
        return self.variants([NONE] * len(self.parts), 0)

    @cached_property
    def least_work(self) -> float:
        """Least time of a microbatch, recomputed or not."""
        return least_of(self.alone)

    def variants(self, replicas: list[PerAction], buffers: int) -> Variants:
        """Its costs without and with recomputation, with more time of every part and more workspace."""
        kind, parts, device = self.kind, self.parts, self.inside.device
        held = [each.part for each in parts]
        times = [each.times + more for each, more in zip(parts, replicas, strict=True)]
        plain = Running(
            sum(times, NONE),
            sum(each.after_forward for each in held),
            sum(each.after_input for each in held),
            max(each.workspace for each in held) + buffers,
        )
        full = selective = None
        if kind.can_recompute:
            # F keeps only the input, and I begins with an F (Chen et al. 2016, §3).
            again = [each.times.forward for each in parts]
            full = _repeating(plain, _later(times, again), held[0].input_bytes)
        if kind.can_recompute and (dropped := sum(each.dropped for each in parts)):
            # What is dropped exists during I only (Korthikanti et al. 2022, §5).
            selective = Running(
                _later(times, [each.again for each in parts]),
                plain.after_forward - dropped,
                plain.after_input,
                max(each.part.workspace + each.dropped for each in parts) + buffers,
            )
        elif kind.can_recompute and self.inside.modules == OPERATIONS and not self.is_half and is_known(held):
            repeated = sum(each.times.forward for each in parts) - saved_time(held, self.stream, device)
            selective = _repeating(plain, _later([plain.times], [repeated]), saved_bytes(held))
        hidden = sum((each.hidden for each in parts), NONE)
        if not hidden.total:
            return plain, full, selective

        def with_pairs(running: Running) -> Running:
            # What recomputation exchanges again does not count: Megatron-LM refuses pairs that repeat it.
            return replace(running, hidden=hidden, pair_factor=device.cost_of_pairs)

        return with_pairs(plain), full and with_pairs(full), selective and with_pairs(selective)

    @cached_property
    def flops(self) -> PerAction:
        """Operations of its matrix products."""
        return sum((each.part.flops for each in self.parts), NONE)

    @cached_property
    def shares(self) -> TimeShares:
        """What its times consist of."""
        return sum((each.shares for each in self.parts), NO_TIME)

    @cached_property
    def exchanged(self) -> PerAction:
        """Microseconds in which compute waits for exchanges."""
        return sum((each.exchanged for each in self.parts), NONE)


@lru_cache(maxsize=4096)
def unreplicated(
    model: Transformer,
    degrees: Degrees,
    inside: Inside,
    sequences: int,
    ends_share_rank: bool,
    by_halves: bool,
) -> tuple[tuple[tuple[Unreplicated, ...], int], ...]:
    """The different layers of a model, or their halves, and the number of each."""
    kinds, different = different_layers(model, inside.gradient_bytes, ends_share_rank)
    found: list[tuple[tuple[Unreplicated, ...], int]] = []
    for number in range(max(different) + 1):
        same = [kind for kind, at in zip(kinds, different, strict=True) if at == number]
        kind = _unnamed(same[0])
        shapes = shapes_of(model, kind, degrees, sequences)
        parts = {name: _part(half, shapes, inside) for name, half in kind.halves}
        is_half = by_halves and len(parts) > 1
        split = {name: (part,) for name, part in parts.items()} if is_half else {"": tuple(parts.values())}
        layers = tuple(
            Unreplicated(name, kind, own, shapes.stream, inside, is_half) for name, own in split.items()
        )
        found.append((layers, sum(kind.count for kind in same)))
    return tuple(found)


def _part(half: Kind, shapes: Shapes, inside: Inside) -> Computed:
    """A part; without routed experts it is the same however these are divided, and is computed once."""
    undivided = replace(shapes, degrees=replace(shapes.degrees, expert=1, expert_in_node=1))
    found = _computed(half, undivided, inside)
    return _computed(half, shapes, inside) if found.part.parameters.experts else found


def _later(times: list[PerAction], again: list[float]) -> PerAction:
    """The times of some parts, each with a longer I."""
    longer = (each + PerAction(backward_input=more) for each, more in zip(times, again, strict=True))
    return sum(longer, NONE)


def _repeating(plain: Running, times: PerAction, kept: int) -> Running:
    """Costs where I begins with most of F, whose outputs, except those kept, exist in the backward only."""
    again = plain.workspace + plain.after_forward - kept
    return Running(times, kept, plain.after_input, max(plain.workspace, again))


@lru_cache(maxsize=256)
def different_layers(
    model: Transformer, gradient_bytes: float, ends_share_rank: bool
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """All layers in model order, and the index of each among those that differ by more than their names.

    A model may have hundreds of layers, but few different ones.
    """
    kinds = layer_kinds(model, gradient_bytes, ends_share_rank)
    found: dict[LayerKind, int] = {}
    return kinds, tuple(found.setdefault(_unnamed(kind), len(found)) for kind in kinds)


def _unnamed(kind: LayerKind) -> LayerKind:
    return replace(kind, name="", copies=None)
