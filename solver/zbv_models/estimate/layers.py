"""Costs and memory of a model's layers on one device.

The figures of a block are the sums of its halves' figures, except for the workspace: that is the largest one,
because a device runs one action at a time, and in addition what replicas gather or reduce of a block at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zbv_models.estimate.device import Device, GroupLink, GroupLinks
from zbv_models.estimate.frozen import Frozen
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import LayerKind
from zbv_models.estimate.muon import orthogonalization_time
from zbv_models.estimate.part import Part
from zbv_models.estimate.replica import (
    NO_TIME,
    Inside,
    Running,
    Unreplicated,
    different_layers,
    least_of,
    unreplicated,
)
from zbv_models.estimate.shapes import NONE, Degrees, PerAction
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
    StepTimes,
    TimeShares,
    buffer_bytes,
    microbatch_times,
    step_times,
)

CORE = frozenset(("core_attn",))
NO_STEP = StepTimes()
NO_LINK = GroupLink()
MIXED = StateBytes()
"""Adam in mixed precision."""


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

    def shares(self, part: Part, degrees: Degrees) -> tuple[Share, ...]:
        """The parameters of a part by their replicas and states."""
        trained, frozen = (
            shares_of(parameters, self.state, self.account, degrees)
            for parameters in (part.trained, part.frozen)
        )
        size = part.frozen_bytes
        return trained + tuple(replace(each, kept=each.kept.frozen(size)) for each in frozen if each.count)

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
    kinds, different = different_layers(model, training.kept(degrees).accumulated, training.ends_share_rank)
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
    return unreplicated(model, of_parts, inside, sequences, training.ends_share_rank, training.by_halves)


def kept_together(
    model: Transformer, layers: Iterable[LayerEstimate], ends_share_rank: bool
) -> tuple[tuple[str, str], ...]:
    """The first and the last of layers that a cut must not separate.

    Several modules of multi-token prediction share one table on their rank, so they are in one stage
    (Megatron-LM, ``validate_layer_layout``).
    """
    if model.prediction_layers < 2 or ends_share_rank:
        return ()
    names = [name for layer in layers for name in layer.names if name.startswith("prediction")]
    return ((names[0], names[-1]),)


def _layer(
    of: Unreplicated, degrees: Degrees, device: Device, links: GroupLinks, training: Training
) -> LayerEstimate:
    """A layer with its replicas."""
    stage, parts = degrees.zero_stage, of.parts
    shares = [training.shares(each.part, degrees) for each in parts]
    replicas = [
        microbatch_times(own, stage, each.times, links) for own, each in zip(shares, parts, strict=True)
    ]
    waiting, buffers = sum(replicas, NONE), sum(map(buffer_bytes, shares))
    step = sum((step_times(own, stage, device, links) for own in shares), StepTimes())
    if training.state.optimizer == "muon":
        products = (
            orthogonalization_time(each.part, of.stream, degrees, device, links.tensor) for each in parts
        )
        step += StepTimes(optimizer=sum(products))
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
        step=step,
        shares=of.shares + TimeShares(data_parallel=waiting.total),
        exchanged=of.exchanged + waiting,
    )


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
