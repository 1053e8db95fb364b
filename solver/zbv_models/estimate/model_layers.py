"""A model as a sequence of layers, each made of parts.

The layers are in model order: with a vision encoder its patches, blocks and projector; the embedding; the
blocks, equal neighbours as one layer with copies; modules of multi-token prediction; the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from zbv_models.estimate.attention import Attention
from zbv_models.estimate.compressed_attention import CompressedAttention
from zbv_models.estimate.ends import Embedding, Head, Joining, Patches, Projector
from zbv_models.estimate.feed_forward import Experts, Mlp
from zbv_models.estimate.frozen import Frozen, FrozenPart, Lora, WholePart
from zbv_models.estimate.hyper_connections import AttentionResidual, Collapse, Half, HyperConnected
from zbv_models.estimate.indexer import Indexer
from zbv_models.estimate.latent_attention import LatentAttention
from zbv_models.estimate.layer_inputs import LayerInput
from zbv_models.estimate.model import Compressed, Transformer, Vision
from zbv_models.estimate.part import Matrix, Part
from zbv_models.estimate.sees import CompressedSees, Sees
from zbv_models.estimate.shapes import Degrees, Parameters, Shapes, Stream
from zbv_models.estimate.state_space import GivenCosts

Kind = (
    Attention
    | LatentAttention
    | CompressedAttention
    | GivenCosts
    | Mlp
    | Experts
    | HyperConnected
    | AttentionResidual
    | LayerInput
    | Collapse
    | Embedding
    | Joining
    | Head
    | Patches
    | Projector
    | FrozenPart
)
"""A kind of part: half a block, or an end of the model."""
Halves = tuple[tuple[str, Kind], ...]


@dataclass(frozen=True)
class LayerKind:
    """Equal layers of a model."""

    name: str
    halves: Halves
    """Its parts in order, with their names."""
    copies: int | None = None
    """Number of copies; None for a single layer, which keeps its name."""
    can_recompute: bool = True
    """Whether full recomputation applies."""
    sees: tuple[Stream, int, int] | None = None
    """Stream, tokens per sequence, and sequences per sequence of the model, where they are not the
    model's."""
    streams: int = 1
    """Number of outputs, each as large as the stream, that the next layer receives."""
    is_frozen: bool = False
    """Whether its own parameters do not train."""
    lora: Lora | None = None
    """Its adapters, if it is frozen."""

    @property
    def count(self) -> int:
        """Number of copies, at least 1."""
        return self.copies or 1


HALF_NAMES = {"M": "state-space", "*": "attention", "W": "local", "I": "indexed", "-": "mlp", "E": "experts"}
"""Names of layers of one letter."""
MIXERS = {"M": "state-space", "*": "global", "W": "local", "I": "indexed"}
"""Words for the first half of a block, where a model has several."""


@lru_cache(maxsize=256)
def layer_kinds(
    model: Transformer, gradient_bytes: float = 2.0, ends_share_rank: bool = True
) -> tuple[LayerKind, ...]:
    """All layers in model order.

    Parameters
    ----------
    gradient_bytes
        Size of an accumulated gradient of a parameter.
    ends_share_rank
        Whether embedding and head are on one rank, so that shared tables are there once.
    """
    frozen = Frozen.of(model)
    embedding = Embedding(model.vocabulary, model.positions == "learned", gradient_bytes)
    predictions = model.prediction_layers
    has_table = not (model.tied_embeddings and ends_share_rank)
    head: Halves = (("head", Head(model.vocabulary, has_table, 1 + predictions, model.fused_loss)),)
    if model.residual_streams > 1:
        head = (("streams", Collapse(model.residual_streams)), *head)
    is_frozen, is_frozen_head = (name in frozen.parts for name in ("embedding", "head"))
    found = (
        *(() if model.vision is None else _vision_layers(model.vision, model, frozen)),
        LayerKind("embedding", (("embedding", embedding),), can_recompute=False, is_frozen=is_frozen),
        *blocks(model),
        *_predictions(model, replace(embedding, learned_positions=False), frozen, ends_share_rank),
        LayerKind("head", head, can_recompute=False, is_frozen=is_frozen_head),
    )
    return tuple(_with_frozen(found, model))


def _predictions(
    model: Transformer, embedding: Embedding, frozen: Frozen, ends_share_rank: bool
) -> Iterator[LayerKind]:
    """Modules of multi-token prediction. The first one has the table that all of them look up tokens in."""
    modules, copies = model.prediction_layers, not ends_share_rank
    halves = tuple(half for letters in model.prediction_kinds for half in _halves(model, letters))
    every = LayerKind(
        "prediction",
        (("joining", Joining(embedding, copies)), *halves),
        modules,
        streams=1 + modules,
        is_frozen="predictions" in frozen.parts,
    )
    if modules == 0:
        return
    if modules == 1 or not copies:
        yield every
        return
    yield replace(every, name="prediction.0", copies=None)
    others: Halves = (("joining", Joining(embedding)), *halves)
    for place in range(1, modules):
        yield replace(every, name=f"prediction.{place}", copies=None, halves=others)


def _with_frozen(kinds: Iterable[LayerKind], model: Transformer) -> Iterator[LayerKind]:
    """The layers, frozen ones with their adapters and without what they do not compute."""
    trains = False
    for kind in kinds:
        trains = trains or is_adapted(model, kind) or not kind.is_frozen
        if kind.is_frozen:
            halves = tuple(
                (name, FrozenPart(half, trains, kind.lora, model.frozen_dtype)) for name, half in kind.halves
            )
            yield replace(kind, halves=halves, can_recompute=kind.can_recompute and trains)
        else:
            yield kind


def is_adapted(model: Transformer, kind: LayerKind) -> bool:
    """Whether a layer has adapters: those of state space have no matrices that zbv knows."""
    return kind.lora is not None and any(map(kind.lora.adapts, matrices_of(model, kind)))


def layers_without_backward(model: Transformer) -> int:
    """The layers below the first one that trains, which have no I."""
    return sum(
        kind.count
        for kind in layer_kinds(model)
        if all(isinstance(half, FrozenPart) and not half.is_differentiated for _, half in kind.halves)
    )


def training_text(model: Transformer) -> str:
    """How much of a model with frozen parts trains, to follow the number of its parameters.

    Plans send a gradient to every stage, also where nothing trains: the worker sends zeros, and what a
    transfer takes has no direction in a problem.
    """
    adapted = sum(kind.count for kind in blocks(model) if is_adapted(model, kind))
    text = "" if model.lora_rank is None else f", with adapters in {adapted} of {model.layers} layers"
    below = layers_without_backward(model)
    if below > 1:  # an embedding is rarely alone on a stage
        text += (
            f"; the first {below} layers have no I, and gradients that nobody needs are sent to their ranks"
        )
    return text


def matrices_of(model: Transformer, kind: LayerKind) -> tuple[Matrix, ...]:
    """The matrices of a layer that LoRA may adapt."""
    shapes = shapes_of(model, kind, Degrees())
    return tuple(matrix for _, half in kind.halves for matrix in half.part(shapes).matrices)


def whole_halves(model: Transformer) -> Iterator[WholePart]:
    """All parts, as they are if nothing is frozen."""
    for kind in layer_kinds(model):
        for _, half in kind.halves:
            yield half.half if isinstance(half, FrozenPart) else half


def count_layers(model: Transformer) -> int:
    """Number of layers, copies counted."""
    return sum(kind.count for kind in layer_kinds(model))


def expert_degree(model: Transformer) -> int:
    """Greatest number of devices that can share the routed experts of a block; 1 without experts."""
    has_experts = any("E" in model.likes(letters) for letters in (*model.kinds, *model.prediction_kinds))
    return (model.experts or 1) if has_experts else 1


def shapes_of(model: Transformer, kind: LayerKind, degrees: Degrees, sequences: int = 1) -> Shapes:
    """The sizes that a layer sees, for a number of sequences per microbatch."""
    if kind.sees is None:
        return Shapes(model.stream, model.sequence, sequences, degrees)
    stream, tokens, per_sequence = kind.sees
    return Shapes(stream, tokens, sequences * per_sequence, degrees)


def parameters_of(model: Transformer, *, with_predictions: bool = True) -> Parameters:
    """Those of the model; tied ones are counted once, and so are the tables that predictions share."""
    if not with_predictions:
        model = model.model_copy(update={"prediction_layers": 0})
    return sum((part.parameters.scaled(kind.count) for kind, part in _parts(model)), Parameters())


def trained_parameters_of(model: Transformer) -> Parameters:
    """Those that train."""
    return sum((part.trained.scaled(kind.count) for kind, part in _parts(model)), Parameters())


def model_flops(model: Transformer) -> float:
    """Operations of a training step per sequence, without recomputation, also not that of flash attention.

    Narayanan et al. 2021, §5.1; Chowdhery et al. 2022, PaLM, appendix B. Attention counts as it is computed:
    half where flash attention leaves out what a causal mask hides.
    """
    total = 0.0
    for kind, part in _parts(model):
        products = sum(each.of_actions.total * each.flops for each in part.products)
        total += kind.count * (products + (3 if part.is_differentiated else 1) * part.core.forward)
    return total


def _parts(model: Transformer) -> Iterator[tuple[LayerKind, Part]]:
    """The parts of all kinds of layers, without parallelism."""
    for kind in layer_kinds(model):
        shapes = shapes_of(model, kind, Degrees())
        for _, half in kind.halves:
            yield kind, half.part(shapes)


@lru_cache(maxsize=64)
def blocks(model: Transformer) -> tuple[LayerKind, ...]:
    """Equal neighbours as one layer with copies.

    A kind of block that occurs in several places gives layers without copies, numbered by their place.
    """
    kinds, frozen = model.kinds, Frozen.of(model)
    runs = [
        list(run)
        for _, run in groupby(
            range(len(kinds)),
            key=lambda layer: (kinds[layer], layer in frozen.blocks, layer in frozen.adapted),
        )
    ]
    places = [_name(model, kinds[run[0]]) for run in runs]
    found: list[LayerKind] = []
    for run, name in zip(runs, places, strict=True):
        is_frozen = run[0] in frozen.blocks
        kind = LayerKind(
            name,
            _halves(model, kinds[run[0]]),
            len(run),
            is_frozen=is_frozen,
            lora=frozen.lora if run[0] in frozen.adapted else None,
        )
        if places.count(name) == 1:
            found.append(kind)
        else:
            found += [replace(kind, name=f"{name}.{layer}", copies=None) for layer in run]
    return tuple(found)


def _name(model: Transformer, letters: str) -> str:
    letters = model.likes(letters)
    if len(letters) == 1:
        return HALF_NAMES[letters]
    kinds = [model.likes(each) for each in model.kinds if len(each) == 2]
    words = []
    if model.experts is not None and len(kinds) == len(model.kinds):
        words.append("moe" if letters[1] == "E" else "dense")
    if len({each[0] for each in kinds}) > 1:
        words.append(MIXERS[letters[0]])
    return "-".join(words) or "block"


def _halves(model: Transformer, letters: str) -> Halves:
    halves = tuple(_half(*model.varied(letter)) for letter in letters)
    if model.residual_sums is not None:
        sums = model.residual_sums
        return tuple((name, AttentionResidual(half, sums)) for name, half in halves)
    if model.residual_streams == 1:
        if model.layer_inputs is None:
            return halves
        rows = model.layer_vocabulary or model.vocabulary
        return (*halves, ("layer-input", LayerInput(rows, model.layer_inputs)))
    return tuple((name, HyperConnected(half, model.residual_streams)) for name, half in halves)


def _half(model: Transformer, letter: str) -> tuple[str, Half]:
    if letter == "M" and model.state_space is not None:
        return ("state-space", model.state_space)
    if letter == "E":
        return ("experts", _experts(model))
    if letter == "-":
        return ("mlp", Mlp(model.ffn_width, model.gated, model.fused_activation))
    return ("attention", _attention(model, letter))


def _attention(model: Transformer, letter: str) -> Attention | LatentAttention | CompressedAttention:
    window = None if letter == "*" else model.window
    if model.compressed is not None:
        return _compressed(model, model.compressed)
    sees = Sees(model.attention == "flash", model.causal, window, model.chunked)
    indexer = None
    if letter == "I":
        indexer = Indexer(model.index_heads or 1, model.index_dim or 1, model.index_pool)
    if model.kv_lora_rank is not None:
        plain, rotated, values = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        return LatentAttention(
            model.heads,
            model.q_lora_rank,
            model.kv_lora_rank,
            plain or 0,
            rotated or 0,
            values or 0,
            sees,
            indexer,
            absorbed=model.index_heads is not None,
            gate=model.heads * (values or 0) if model.output_gate else model.heads * model.head_gate,
        )
    return Attention(
        model.heads,
        model.n_kv_heads,
        model.width_of_head,
        model.has_qkv_bias,
        model.qk_norm,
        model.positions == "rotary",
        sees,
        model.output_gate,
        indexer,
        model.value_dim,
        model.shared_values,
        model.reads_keys,
        model.head_gate,
    )


def _compressed(model: Transformer, sizes: Compressed) -> CompressedAttention:
    return CompressedAttention(
        model.heads,
        model.width_of_head,
        sizes.query_rank,
        sizes.output_groups,
        sizes.output_rank,
        CompressedSees(
            model.attention == "flash", model.causal, model.window, False, sizes.ratio, sizes.chosen
        ),
        (model.index_heads or 1, model.index_dim or 1) if sizes.chosen else None,
    )


def _experts(model: Transformer) -> Experts:
    width = model.ffn_width if model.expert_ffn is None else model.expert_ffn
    shared = None
    if model.shared_expert_ffn is not None:
        shared = Mlp(model.shared_expert_ffn, model.gated, model.fused_activation)
    return Experts(
        model.experts or 1,
        model.experts_per_token or 1,
        Mlp(width, model.gated, model.fused_activation),
        shared,
        model.shared_expert_gate,
        model.capacity_factor,
        model.expert_nodes,
        model.expert_hidden,
    )


def _vision_layers(vision: Vision, model: Transformer, frozen: Frozen) -> Iterator[LayerKind]:
    """Patches, blocks and projector; blocks that differ from their neighbours are numbered by their place.

    The blocks keep no scores.
    """
    norm = 2 if vision.norm == "layernorm" else 1
    stream = Stream(vision.hidden, model.dtype_bytes, norm, vision.bias, False, model.narrow_dtype)
    sees = (stream, vision.patches, vision.images)
    rotary = vision.positions in ("rotary", "both")

    def halves(window: int | None) -> Halves:
        pairs = Sees(causal=False, window=window, chunked=window is not None)
        width = vision.hidden // vision.heads
        attention = Attention(vision.heads, vision.heads, width, vision.bias, False, rotary, pairs)
        return (("attention", attention), ("mlp", Mlp(vision.ffn_width, vision.gated)))

    places = vision.position_table or vision.patches
    patches = Patches(vision.patch_values, places if vision.positions in ("learned", "both") else 0)
    is_frozen = "vision" in frozen.parts
    yield LayerKind("patches", (("patches", patches),), can_recompute=False, sees=sees, is_frozen=is_frozen)
    full, local = halves(None), halves(vision.window)
    kinds = [full if place in vision.full_attention else local for place in range(vision.layers)]
    if len(set(kinds)) == 1:
        yield LayerKind("vision", kinds[0], len(kinds), sees=sees, is_frozen=is_frozen)
    else:
        for place, kind in enumerate(kinds):
            yield LayerKind(f"vision.{place}", kind, sees=sees, is_frozen=is_frozen)
    inner = (model.hidden,) if vision.projector is None else vision.projector
    projector = Projector(
        vision.merged, (*inner, model.hidden), vision.pooled, vision.projector_gated, vision.projectors
    )
    yield LayerKind(
        "projector",
        (("projector", projector),),
        can_recompute=False,
        sees=sees,
        is_frozen="projector" in frozen.parts,
    )
