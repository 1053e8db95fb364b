"""Costs and memory of a model's layers on one device.

The figures of a block are the sums of its halves' figures, except for the workspace: that is the largest one,
because a device runs one action at a time, and in addition what replicas gather or reduce of a block at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from zbv_models.estimate.device import Device, GroupLink, GroupLinks
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import Kind, LayerKind, layer_kinds, shapes_of
from zbv_models.estimate.part import Part
from zbv_models.estimate.shapes import NONE, Degrees, Parameters, PerAction, Shapes, Stream
from zbv_models.estimate.states import (
    Account,
    HeldBytes,
    Share,
    StateBytes,
    StaticBytes,
    by_zero,
    passing_of,
    shares_of,
    static_of,
)
from zbv_models.estimate.times import (
    OPERATIONS,
    StepTimes,
    TimeShares,
    accumulated_bytes,
    adding_time,
    buffer_bytes,
    compute_times,
    exchange_times,
    hidden_times,
    is_known,
    microbatch_times,
    repeated_time,
    saved_bytes,
    saved_time,
    step_times,
)

CORE = frozenset(("core_attn",))
NO_STEP = StepTimes()
NO_TIME = TimeShares()
NO_LINK = GroupLink()
MIXED = StateBytes()
"""Adam in mixed precision."""


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
class LayerEstimate:
    """One layer, on one device."""

    name: str
    flops: PerAction
    """Operations of its matrix products."""
    plain: Running
    full: Running | None
    """Its costs when its stage is recomputed in full; None if it cannot be recomputed."""
    selective: Running | None
    """Those with selective recomputation; None if that drops nothing."""
    parameters: int
    """Number of parameters."""
    static: StaticBytes
    """Bytes of parameters, gradients and optimizer, as a whole number."""
    output_bytes: int
    """Size of the output, and of its gradient."""
    repeat: int | None = None
    """Number of copies; None for a single layer, which keeps its name."""
    step: StepTimes = NO_STEP
    """What one copy costs per step."""
    shares: TimeShares = NO_TIME
    """What its times consist of, without recomputation."""
    exchanged: PerAction = NONE
    """Microseconds of F, I and W in which compute waits for exchanges, without recomputation."""
    passing: int = 0
    """Of the gradients, bytes that exist only from the first to the last backward of a stage."""

    def recomputed(self, kind: str) -> Running | None:
        """Its costs where its stage is recomputed; None if it then has no other costs."""
        return None if kind == "none" else self.selective if kind == "selective" else self.full

    @property
    def least_work(self) -> float:
        """Least time of a microbatch on one copy, recomputed or not."""
        return least_of((self.plain, self.full, self.selective))

    @property
    def copies(self) -> int:
        """Number of layers that it stands for."""
        return self.repeat or 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its copies in a model."""
        if self.repeat is None:
            return (self.name,)
        return tuple(f"{self.name}.{copy}" for copy in range(self.repeat))


@dataclass(frozen=True)
class Training:
    """What training keeps, and how it is planned."""

    state: StateBytes = MIXED
    """The states that the program chooses."""
    account: Account = by_zero
    """What a device keeps of them."""
    modules: frozenset[str] = CORE
    """What selective recomputation repeats, of Megatron-LM's names: ``core_attn``, ``layernorm``,
    ``mla_up_proj``, ``mlp``, ``moe_act``, ``shared_experts``, ``moe``. Or ``op`` alone, which is that of
    torchtitan (:mod:`zbv_models.estimate.times`)."""
    ends_share_rank: bool = False
    """Whether the first and the last stage are on one rank, which then holds shared tables once."""
    by_halves: bool = False
    """Whether the halves of a block are layers."""
    fused_gradients: bool = True
    """Whether W's products add their results to the accumulated gradients, as in Megatron-LM
    (``gradient_accumulation_fusion``); otherwise W has a kernel for that."""
    keeps_gathered: bool = False
    """As in :class:`~zbv_models.estimate.shapes.Degrees`."""
    pairs: str = "none"
    """What a pair of a forward and a backward hides, a key of :data:`~zbv_models.estimate.times.HIDDEN`."""

    def shares(self, parameters: Parameters, degrees: Degrees) -> tuple[Share, ...]:
        """The parameters of a layer by their replicas and states."""
        return shares_of(parameters, self.state, self.account, degrees)

    def kept(self, degrees: Degrees) -> HeldBytes:
        """What a device keeps per parameter of a matrix."""
        return self.account(self.state, degrees.zero_stage, False)


@dataclass(frozen=True)
class ModelEstimate:
    """The layers of a model on one device of each rank, and what a step costs in addition."""

    layers: tuple[LayerEstimate, ...]
    """In model order."""
    table_reduction: float
    """Microseconds per step, on the ranks that hold a copy of the embedding's table: they sum its
    gradients."""


def estimate_model(
    model: Transformer,
    degrees: Degrees,
    device: Device,
    links: GroupLinks,
    training: Training,
    sequences: int = 1,
) -> ModelEstimate:
    """Estimate a model under a layout, for microbatches of a number of sequences.

    A pure function without validation. The degrees must divide what they share: heads and widths by the
    tensor-parallel degree, the sequence by it and by the context-parallel degree, the experts by the
    expert-parallel degree, and that must divide the devices of all replicas of a stage.
    """
    kinds, different = _different(model, training.kept(degrees).accumulated, training.ends_share_rank)
    estimates = [
        [_layer(each, degrees, device, links, training) for each in layers]
        for layers, _ in without_replicas(model, degrees, device, links, training, sequences)
    ]
    layers = (
        layer for kind, at in zip(kinds, different, strict=True) for layer in _named(kind, estimates[at])
    )
    return ModelEstimate(tuple(layers), _table_reduction(model, degrees, links, training))


def without_replicas(
    model: Transformer,
    degrees: Degrees,
    device: Device,
    links: GroupLinks,
    training: Training,
    sequences: int = 1,
) -> tuple[tuple[tuple[Unreplicated, ...], int], ...]:
    """What layouts share that differ only in their replicas: the different layers, and the number of each.

    A layer is all of its halves if these are layers, and otherwise it is the only one of its tuple.
    """
    inside = Inside(
        device,
        replace(links, data=NO_LINK, expert_data=NO_LINK, pipeline=NO_LINK),
        training.modules,
        training.kept(degrees).accumulated,
        training.fused_gradients,
        training.pairs,
    )
    # Tensor parallelism casts operands before it gathers them, if parameters are gathered in float8, too.
    is_narrow = training.state.gathered > 0 and degrees.tensor > 1
    of_parts = replace(
        degrees,
        data=1,
        zero_stage=0,
        keeps_gathered=training.keeps_gathered,
        wide_operands=training.keeps_gathered and not is_narrow,
    )
    return _unreplicated(model, of_parts, inside, sequences, training.ends_share_rank, training.by_halves)


@lru_cache(maxsize=256)
def _different(
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
def _unreplicated(
    model: Transformer,
    degrees: Degrees,
    inside: Inside,
    sequences: int,
    ends_share_rank: bool,
    by_halves: bool,
) -> tuple[tuple[tuple[Unreplicated, ...], int], ...]:
    """The different layers of a model, or their halves, and the number of each."""
    kinds, different = _different(model, inside.gradient_bytes, ends_share_rank)
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


def _layer(
    of: Unreplicated, degrees: Degrees, device: Device, links: GroupLinks, training: Training
) -> LayerEstimate:
    """A layer with its replicas."""
    stage, parts = degrees.zero_stage, of.parts
    shares = [training.shares(each.part.parameters, degrees) for each in parts]
    replicas = [
        microbatch_times(own, stage, each.times, links) for own, each in zip(shares, parts, strict=True)
    ]
    waiting, buffers = sum(replicas, NONE), sum(map(buffer_bytes, shares))
    plain, full, selective = of.variants(replicas, buffers) if buffers or waiting.total else of.alone
    return LayerEstimate(
        name=of.name,
        flops=of.flops,
        plain=plain,
        full=full,
        selective=selective,
        parameters=sum(each.part.parameters.on_device(degrees) for each in parts),
        static=sum(map(static_of, shares), StaticBytes()),
        passing=sum(map(passing_of, shares)),
        output_bytes=parts[-1].part.output_bytes * of.kind.streams,
        step=sum((step_times(own, stage, device, links) for own in shares), StepTimes()),
        shares=of.shares + TimeShares(data_parallel=waiting.total),
        exchanged=of.exchanged + waiting,
    )


def _later(times: list[PerAction], again: list[float]) -> PerAction:
    """The times of some parts, each with a longer I."""
    longer = (each + PerAction(backward_input=more) for each, more in zip(times, again, strict=True))
    return sum(longer, NONE)


def _repeating(plain: Running, times: PerAction, kept: int) -> Running:
    """Costs where I begins with most of F, whose outputs, except those kept, exist in the backward only."""
    again = plain.workspace + plain.after_forward - kept
    return Running(times, kept, plain.after_input, max(plain.workspace, again))


def _named(kind: LayerKind, layers: list[LayerEstimate]) -> list[LayerEstimate]:
    """The layers of a kind with their names; halves are layers of every copy."""
    if len(layers) == 1:
        return [replace(layers[0], name=kind.name, repeat=kind.copies)]
    names = [kind.name] if kind.copies is None else [f"{kind.name}.{copy}" for copy in range(kind.copies)]
    return [replace(half, name=f"{of_copy}.{half.name}") for of_copy in names for half in layers]


def _table_reduction(model: Transformer, degrees: Degrees, links: GroupLinks, training: Training) -> float:
    """An all-reduce of the table's gradients between the ranks that hold it (Shoeybi et al. 2019, §3).

    Two ranks send all of it once (Megatron-LM, ``_allreduce_word_embedding_grads``).
    """
    if training.ends_share_rank or not (model.tied_embeddings or model.prediction_layers):
        return 0.0
    size = model.vocabulary * model.stream.hidden // degrees.tensor * training.kept(degrees).accumulated
    return links.pipeline.time(size)
