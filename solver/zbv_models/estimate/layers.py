"""Costs and memory of a model's layers on one device.

The figures of a block are the sums of its halves' figures, except for the workspace: that is the largest one,
because a device runs one action at a time, and in addition what replicas gather or reduce of a block at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from zbv_models.estimate.device import Device, GroupLink, GroupLinks
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import Kind, LayerKind, layer_kinds, shapes_of
from zbv_models.estimate.part import Part
from zbv_models.estimate.shapes import Degrees, Parameters, PerAction, Shapes, Stream
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
NO_TIMES = PerAction()
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

    @property
    def shortest(self) -> PerAction:
        """The same, with a backward that is as short as either I and W or B: no plan has a shorter one."""
        times = self.times
        if self.fused is None or self.fused >= times.backward_input + times.backward_weight:
            return times
        both = min(times.backward_input, self.fused)
        return PerAction(times.forward, both, self.fused - both)


@dataclass(frozen=True)
class LayerEstimate:
    """One layer, on one device."""

    name: str
    flops: PerAction
    """Operations of its matrix products."""
    plain: Running
    recomputed: Running | None
    """Its costs when its stage is recomputed; None if it cannot be recomputed."""
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
    exchanged: PerAction = NO_TIMES
    """Microseconds of F, I and W in which compute waits for exchanges, without recomputation."""
    selective: Running | None = None
    """Those with selective recomputation, where ``recomputed`` is full recomputation."""
    passing: int = 0
    """Of the gradients, bytes that exist only from the first to the last backward of a stage."""

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
    recompute: str = "full"
    """The alternatives that layers carry: ``none``, ``selective``, ``full`` or ``both``."""
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
    layers: list[LayerEstimate] = []
    accumulated = training.kept(degrees).accumulated
    # Parts do not depend on replicas, so layouts that differ only in these share them.
    inside = Inside(
        device,
        replace(links, data=NO_LINK, expert_data=NO_LINK, pipeline=NO_LINK),
        training.modules,
        accumulated,
        training.fused_gradients,
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
        halves = [_layer(part, degrees, device, links, training, kind.can_recompute) for part in parts]
        buffers = [buffer_bytes(training.shares(part.part.parameters, degrees)) for part in parts]
        if training.by_halves and len(parts) > 1:
            return [
                replace(_with_buffers(half, size), name=name, output_bytes=half.output_bytes * kind.streams)
                for half, size, (name, _) in zip(halves, buffers, kind.halves, strict=True)
            ]
        is_full = training.recompute in ("full", "both") and kind.can_recompute
        whole = _whole(kind, halves, parts[0].part.input_bytes if is_full else None)
        if training.modules == OPERATIONS and kind.can_recompute:
            whole = _with_operations(whole, parts, shapes.stream, device, training.recompute)
        return [_with_buffers(whole, sum(buffers))]

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
    """As in :class:`Training`."""


@dataclass(frozen=True)
class Computed:
    """A part, and what does not depend on other parts or on replicas."""

    part: Part
    times: PerAction
    """Compute and exchanges."""
    exchanged: PerAction
    """Of these, exchanges."""
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
    added = NO_TIMES
    if not inside.fused_gradients:
        added = adding_time(part, inside.gradient_bytes, stream, device)
    dropped = part.dropped_bytes(inside.modules)
    again = repeated_time(part, inside.modules, stream, device, inside.links) if dropped else 0.0
    return Computed(
        part,
        compute + exchanged + added,
        exchanged,
        shares + of_exchanges + TimeShares(memory_traffic=added.total),
        dropped,
        again,
    )


def _layer(
    computed: Computed,
    degrees: Degrees,
    device: Device,
    links: GroupLinks,
    training: Training,
    can_recompute: bool,
) -> LayerEstimate:
    """One part as a layer."""
    part, compute, recompute = computed.part, computed.times, training.recompute
    shares = training.shares(part.parameters, degrees)
    replicas = microbatch_times(shares, degrees.zero_stage, compute, links)
    plain = Running(
        compute + replicas,
        part.after_forward,
        part.after_input,
        part.workspace,
    )
    full = selective = None
    if can_recompute and recompute in ("full", "both"):
        # F keeps only the input, and I begins with an F (Chen et al. 2016, §3).
        twice = plain.times + PerAction(backward_input=compute.forward)
        full = Running(twice, part.input_bytes, plain.after_input, _whole_again(plain, part.input_bytes))
    if can_recompute and recompute in ("selective", "both"):
        selective = _selective(computed, plain)
    return LayerEstimate(
        name="",
        flops=part.flops,
        plain=plain,
        recomputed=selective if recompute == "selective" else full,
        parameters=part.parameters.on_device(degrees),
        static=static_of(shares),
        passing=passing_of(shares),
        output_bytes=part.output_bytes,
        step=step_times(shares, degrees.zero_stage, device, links),
        shares=computed.shares + TimeShares(data_parallel=replicas.total),
        exchanged=computed.exchanged + replicas,
        selective=selective if recompute == "both" else None,
    )


def _with_operations(
    layer: LayerEstimate, computed: list[Computed], stream: Stream, device: Device, recompute: str
) -> LayerEstimate:
    """A block with torchtitan's selective recomputation: everything that it computes again exists at once."""
    parts = [each.part for each in computed]
    if recompute not in ("selective", "both") or not is_known(parts):
        return layer
    kept, forward = saved_bytes(parts), sum(each.times.forward for each in computed)
    again = PerAction(backward_input=forward - saved_time(parts, stream, device))
    plain = layer.plain
    selective = Running(
        plain.times + again,
        kept,
        plain.after_input,
        max(plain.workspace, _whole_again(plain, kept)),
    )
    if recompute == "selective":
        return replace(layer, recomputed=selective)
    return replace(layer, selective=selective)


def _selective(computed: Computed, plain: Running) -> Running | None:
    """What is dropped exists during I only (Korthikanti et al. 2022, §5)."""
    if not computed.dropped:
        return None
    return Running(
        plain.times + PerAction(backward_input=computed.again),
        plain.after_forward - computed.dropped,
        plain.after_input,
        plain.workspace + computed.dropped,
    )


def _with_buffers(layer: LayerEstimate, size: int) -> LayerEstimate:
    """A layer with what its replicas gather or reduce at once, while it runs."""
    if not size:
        return layer

    def more(running: Running) -> Running:
        return replace(running, workspace=running.workspace + size)

    return replace(
        layer,
        plain=more(layer.plain),
        recomputed=layer.recomputed and more(layer.recomputed),
        selective=layer.selective and more(layer.selective),
    )


def _named(kind: LayerKind, layers: list[LayerEstimate]) -> list[LayerEstimate]:
    """The layers of a kind with their names; halves are layers of every copy."""
    if len(layers) == 1:
        return [replace(layers[0], name=kind.name, repeat=kind.copies)]
    names = [kind.name] if kind.copies is None else [f"{kind.name}.{copy}" for copy in range(kind.copies)]
    return [replace(half, name=f"{of_copy}.{half.name}") for of_copy in names for half in layers]


def _whole(kind: LayerKind, halves: list[LayerEstimate], kept: int | None) -> LayerEstimate:
    """A layer of several halves; ``kept`` are the bytes that full recomputation keeps of it."""
    whole = halves[0]
    for half in halves[1:]:
        recomputed = selective = None
        if whole.recomputed is not None or half.recomputed is not None:
            recomputed = _both(whole.recomputed or whole.plain, half.recomputed or half.plain)
        if whole.selective is not None or half.selective is not None:
            selective = _both(whole.selective or whole.plain, half.selective or half.plain)
        whole = replace(
            half,
            flops=whole.flops + half.flops,
            plain=_both(whole.plain, half.plain),
            recomputed=recomputed,
            selective=selective,
            parameters=whole.parameters + half.parameters,
            static=whole.static + half.static,
            passing=whole.passing + half.passing,
            step=whole.step + half.step,
            shares=whole.shares + half.shares,
            exchanged=whole.exchanged + half.exchanged,
        )
    if whole.recomputed is not None and kept is not None:
        # The inputs of the later halves are computed again with the rest.
        again = replace(whole.recomputed, after_forward=kept, workspace=_whole_again(whole.plain, kept))
        whole = replace(whole, recomputed=again)
    return replace(whole, output_bytes=whole.output_bytes * kind.streams)


def _both(first: Running, second: Running) -> Running:
    return Running(
        first.times + second.times,
        first.after_forward + second.after_forward,
        first.after_input + second.after_input,
        max(first.workspace, second.workspace),
    )


def _whole_again(plain: Running, kept: int) -> int:
    """Workspace of a recomputed layer: the outputs of F, except the input, exist during its backward only."""
    return plain.workspace + plain.after_forward - kept


def _table_reduction(model: Transformer, degrees: Degrees, links: GroupLinks, training: Training) -> float:
    """An all-reduce of the table's gradients between the ranks that hold it (Shoeybi et al. 2019, §3).

    Two ranks send all of it once (Megatron-LM, ``_allreduce_word_embedding_grads``).
    """
    if training.ends_share_rank or not (model.tied_embeddings or model.prediction_layers):
        return 0.0
    size = model.vocabulary * model.stream.hidden // degrees.tensor * training.kept(degrees).accumulated
    return links.pipeline.time(size)
