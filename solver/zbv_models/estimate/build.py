"""From the section ``model`` of a valid configuration to :class:`Transformer`."""

from __future__ import annotations

from itertools import groupby

from zbv_models.estimate.attention import Attention
from zbv_models.estimate.config_model import ModelConfig, VisionConfig
from zbv_models.estimate.experts import Experts
from zbv_models.estimate.given import GivenCosts
from zbv_models.estimate.indexer import Indexer
from zbv_models.estimate.latent_attention import LatentAttention
from zbv_models.estimate.mlp import Mlp
from zbv_models.estimate.scores import Sees
from zbv_models.estimate.shapes import Stream
from zbv_models.estimate.transformer import Kind, LayerKind, Transformer, VisionEncoder
from zbv_models.estimate.vision import Patches, Projector

Halves = tuple[tuple[str, Kind], ...]

HALF_NAMES = {"M": "state-space", "*": "attention", "W": "local", "I": "indexed", "-": "mlp", "E": "experts"}
"""Names of layers of one letter."""
MIXERS = {"M": "state-space", "*": "global", "W": "local", "I": "indexed"}
"""Words for the first half of a block, where a model has several."""


def transformer(config: ModelConfig) -> Transformer:
    """The model; its microbatch size is not part of it."""
    stream = Stream(
        config.hidden,
        config.dtype_bytes,
        2 if config.norm == "layernorm" else 1,
        config.bias,
        config.dropout,
        config.narrow_dtype,
        config.post_norms,
    )
    return Transformer(
        stream,
        config.sequence,
        config.vocabulary,
        _runs(config),
        config.tied_embeddings,
        config.positions == "learned",
        _predictions(config),
        None if config.vision is None else _vision(config.vision, config, stream),
        config.fused_loss,
    )


def _runs(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Equal neighbours as one layer with copies.

    A kind of block that occurs in several places gives layers without copies, numbered by their place.
    """
    kinds = config.kinds
    runs = [list(run) for _, run in groupby(range(len(kinds)), key=lambda layer: kinds[layer])]
    places = [_name(config, kinds[run[0]]) for run in runs]
    found: list[LayerKind] = []
    for run, name in zip(runs, places, strict=True):
        halves = _halves(config, kinds[run[0]])
        if places.count(name) == 1:
            found.append(LayerKind(name, halves, len(run)))
        else:
            found += [LayerKind(f"{name}.{layer}", halves) for layer in run]
    return tuple(found)


def _name(config: ModelConfig, letters: str) -> str:
    if len(letters) == 1:
        return HALF_NAMES[letters]
    kinds = [each for each in config.kinds if len(each) == 2]
    words = []
    if config.experts is not None and len(kinds) == len(config.kinds):
        words.append("moe" if letters[1] == "E" else "dense")
    if len({each[0] for each in kinds}) > 1:
        words.append(MIXERS[letters[0]])
    return "-".join(words) or "block"


def _halves(config: ModelConfig, letters: str) -> Halves:
    return tuple(_half(config, letter) for letter in letters)


def _half(config: ModelConfig, letter: str) -> tuple[str, Kind]:
    if letter == "M" and config.state_space is not None:
        given = config.state_space
        costs = GivenCosts(
            given.parameters,
            given.flops,
            given.core_flops,
            given.memory_traffic,
            given.after_forward,
            given.after_input,
        )
        return ("state-space", costs)
    if letter == "E":
        return ("experts", _experts(config))
    if letter == "-":
        return ("mlp", Mlp(config.ffn_width, config.gated, config.fused_activation))
    return ("attention", _attention(config, letter))


def _attention(config: ModelConfig, letter: str) -> Attention | LatentAttention:
    sees = Sees(
        config.attention == "flash",
        config.causal,
        None if letter == "*" else config.window,
        config.chunked,
    )
    indexer = None
    if letter == "I":
        indexer = Indexer(config.index_heads or 1, config.index_dim or 1)
    if config.kv_lora_rank is not None:
        plain, rotated, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        return LatentAttention(
            config.heads,
            config.q_lora_rank,
            config.kv_lora_rank,
            plain or 0,
            rotated or 0,
            values or 0,
            sees,
            indexer,
            absorbed=config.index_heads is not None,
        )
    return Attention(
        config.heads,
        config.n_kv_heads,
        config.width_of_head,
        config.has_qkv_bias,
        config.qk_norm,
        config.positions == "rotary",
        sees,
        config.output_gate,
        indexer,
    )


def _experts(config: ModelConfig) -> Experts:
    width = config.ffn_width if config.expert_ffn is None else config.expert_ffn
    shared = None
    if config.shared_expert_ffn is not None:
        shared = Mlp(config.shared_expert_ffn, config.gated, config.fused_activation)
    return Experts(
        config.experts or 1,
        config.experts_per_token or 1,
        Mlp(width, config.gated, config.fused_activation),
        shared,
        config.shared_expert_gate,
        config.capacity_factor,
        config.expert_nodes,
        config.expert_hidden,
    )


def _predictions(config: ModelConfig) -> tuple[LayerKind, ...]:
    """What every module of multi-token prediction has after the projection."""
    halves = tuple(half for kind in config.prediction_kinds for half in _halves(config, kind))
    return (LayerKind("prediction", halves, config.prediction_layers),) if config.prediction_layers else ()


def _vision(vision: VisionConfig, config: ModelConfig, model: Stream) -> VisionEncoder:
    """Its blocks keep no scores."""
    norm = 2 if vision.norm == "layernorm" else 1
    stream = Stream(vision.hidden, model.dtype_bytes, norm, vision.bias, False, model.product_dtype)
    width = vision.hidden // vision.heads
    rotary = vision.positions in ("rotary", "both")
    ffn = 4 * vision.hidden if vision.ffn is None else vision.ffn

    def halves(window: int | None) -> Halves:
        sees = Sees(causal=False, window=window, chunked=window is not None)
        attention = Attention(vision.heads, vision.heads, width, vision.bias, False, rotary, sees)
        return (("attention", attention), ("mlp", Mlp(ffn, vision.gated)))

    full, local = halves(None), halves(vision.window)
    inner = (config.hidden,) if vision.projector is None else vision.projector
    return VisionEncoder(
        stream,
        vision.patches,
        vision.images,
        Patches(vision.patch_values, vision.positions in ("learned", "both")),
        tuple(full if place in vision.full_attention else local for place in range(vision.layers)),
        Projector(
            vision.merged,
            (*inner, config.hidden),
            vision.pooled,
            vision.projector_gated,
            vision.projectors,
        ),
    )
