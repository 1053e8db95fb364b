"""Costs and memory of a model's layers on one device.

The figures of a block are the sums of its halves' figures, except for the workspace: that is the largest one,
because a device runs one action at a time, and in addition what replicas gather or reduce of a block at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zbv_models.estimate.device import Device, GroupLink, GroupLinks
from zbv_models.estimate.frozen import Frozen
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import Kind, LayerKind, layer_kinds, shapes_of
from zbv_models.estimate.part import Part
from zbv_models.estimate.shapes import NONE, Degrees, PerAction, Shapes, Stream
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

    def shares(self, part: Part, degrees: Degrees) -> tuple[Share, ...]:
        """The parameters of a part by their replicas and states."""
        trained, frozen = (
            shares_of(parameters, self.state, self.account, degrees)
            for parameters in (part.trained, part.frozen)
        )
        return trained + tuple(replace(each, kept=each.kept.frozen) for each in frozen if each.count)

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
    layers: list[LayerEstimate] = []
    accumulated = training.kept(degrees).accumulated
    # Parts do not depend on replicas, so layouts that differ only in these share them.
    inside = Inside(
        device,
        replace(links, data=NO_LINK, expert_data=NO_LINK, pipeline=NO_LINK),
        training.modules,
        accumulated,
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

    def computed(kind: LayerKind) -> list[LayerEstimate]:
        """The layer, or its halves."""
        shapes = shapes_of(model, kind, of_parts, sequences)
        parts = [_computed(half, shapes, inside) for _, half in kind.halves]
        rest = kind, degrees, device, links, training, shapes.stream
        if training.by_halves and len(parts) > 1:
            halves = zip(parts, kind.halves, strict=True)
            return [replace(_layer([part], *rest), name=name) for part, (name, _) in halves]
        return [_layer(parts, *rest)]

    # A model may have hundreds of layers that differ by their names only.
    equal: dict[LayerKind, list[LayerEstimate]] = {}
    for kind in layer_kinds(model, accumulated, training.ends_share_rank):
        unnamed = replace(kind, name="", copies=None)
        if unnamed not in equal:
            equal[unnamed] = computed(unnamed)
        layers += _named(kind, equal[unnamed])
    return ModelEstimate(tuple(layers), _table_reduction(model, degrees, links, training))


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


def _layer(
    parts: list[Computed],
    kind: LayerKind,
    degrees: Degrees,
    device: Device,
    links: GroupLinks,
    training: Training,
    stream: Stream,
) -> LayerEstimate:
    """Some parts as a layer."""
    stage, held = degrees.zero_stage, [each.part for each in parts]
    shares = [training.shares(each, degrees) for each in held]
    replicas = [
        microbatch_times(of, stage, each.times, links) for of, each in zip(shares, parts, strict=True)
    ]
    buffers = sum(map(buffer_bytes, shares))
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
        full = _repeating(plain, _later(times, [each.times.forward for each in parts]), held[0].input_bytes)
    if kind.can_recompute and (dropped := sum(each.dropped for each in parts)):
        # What is dropped exists during I only (Korthikanti et al. 2022, §5).
        selective = Running(
            _later(times, [each.again for each in parts]),
            plain.after_forward - dropped,
            plain.after_input,
            max(each.part.workspace + each.dropped for each in parts) + buffers,
        )
    elif kind.can_recompute and training.modules == OPERATIONS and not training.by_halves and is_known(held):
        again = sum(each.times.forward for each in parts) - saved_time(held, stream, device)
        selective = _repeating(plain, _later([plain.times], [again]), saved_bytes(held))
    hidden = sum((each.hidden for each in parts), NONE)

    def with_pairs(running: Running) -> Running:
        # What recomputation exchanges again does not count: Megatron-LM refuses pairs that repeat it.
        return replace(running, hidden=hidden, pair_factor=device.cost_of_pairs) if hidden.total else running

    waiting = [each.exchanged + more for each, more in zip(parts, replicas, strict=True)]
    of_replicas = TimeShares(data_parallel=sum(each.total for each in replicas))
    return LayerEstimate(
        name="",
        flops=sum((each.flops for each in held), NONE),
        plain=with_pairs(plain),
        full=full and with_pairs(full),
        selective=selective and with_pairs(selective),
        parameters=sum(each.parameters.on_device(degrees) for each in held),
        static=sum(map(static_of, shares), StaticBytes()),
        passing=sum(map(passing_of, shares)),
        output_bytes=held[-1].output_bytes * kind.streams,
        step=sum((step_times(of, stage, device, links) for of in shares), StepTimes()),
        shares=sum((each.shares for each in parts), of_replicas),
        exchanged=sum(waiting, NONE),
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
    is_shared = model.tied_embeddings or model.prediction_layers
    if training.ends_share_rank or not is_shared or "embedding" in Frozen.of(model).parts:
        return 0.0
    size = model.vocabulary * model.stream.hidden // degrees.tensor * training.kept(degrees).accumulated
    return links.pipeline.time(size)
