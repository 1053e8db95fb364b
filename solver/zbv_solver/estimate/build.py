"""From the section ``model`` of a valid configuration to :class:`Transformer`."""

from __future__ import annotations

from itertools import groupby

from zbv_solver.estimate.attention import Attention
from zbv_solver.estimate.config_model import ModelConfig, VisionConfig
from zbv_solver.estimate.experts import Experts
from zbv_solver.estimate.given import GivenCosts
from zbv_solver.estimate.latent_attention import LatentAttention
from zbv_solver.estimate.mlp import Mlp
from zbv_solver.estimate.shapes import Stream
from zbv_solver.estimate.transformer import Kind, LayerKind, Transformer, VisionEncoder
from zbv_solver.estimate.vision import Patches, Projector

Halves = tuple[tuple[str, Kind], ...]

PATTERN_NAMES = {"M": "state-space", "*": "attention", "-": "mlp", "E": "experts"}


def transformer(config: ModelConfig) -> Transformer:
    """The model; its microbatch size is not part of it."""
    stream = Stream(
        config.hidden,
        config.dtype_bytes,
        2 if config.norm == "layernorm" else 1,
        config.bias,
        config.dropout,
        config.product_dtype,
    )
    return Transformer(
        stream,
        config.sequence,
        config.vocabulary,
        _runs(config),
        config.tied_embeddings,
        config.positions == "learned",
        config.prediction_layers,
        None if config.vision is None else _vision(config.vision, config, stream),
        config.fused_loss,
    )


def _runs(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Equal neighbours as one layer with copies.

    A kind of block that occurs in several places gives layers without copies, numbered by their place.
    """
    halves = [_halves(config, block) for block in range(config.layers)]
    names = [_name(config, block) for block in range(config.layers)]
    if len(set(halves)) == 1 and config.pattern is None:
        return (LayerKind("block", halves[0], config.layers),)
    runs = [list(run) for _, run in groupby(range(config.layers), key=lambda block: halves[block])]
    places = [names[run[0]] for run in runs]
    found: list[LayerKind] = []
    for run, name in zip(runs, places, strict=True):
        if places.count(name) == 1:
            found.append(LayerKind(name, halves[run[0]], len(run)))
        else:
            found += [LayerKind(f"{name}.{block}", halves[block]) for block in run]
    return tuple(found)


def _name(config: ModelConfig, block: int) -> str:
    letter = config.letter(block)
    if letter != "B":
        return PATTERN_NAMES[letter]
    words = []
    if config.experts is not None:
        words.append("moe" if config.has_experts(block) else "dense")
    if config.window is not None and config.full_attention_every is not None:
        words.append("local" if config.has_window(block) else "global")
    return "-".join(words) or "block"


def _halves(config: ModelConfig, block: int) -> Halves:
    letter = config.letter(block)
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
        return (("state-space", costs),)
    first: Halves = (("attention", _attention(config, block)),)
    if config.has_experts(block):
        second: Halves = (("experts", _experts(config)),)
    else:
        second = (("mlp", Mlp(config.ffn_width, config.gated, config.fused_activation)),)
    return {"*": first, "-": second, "E": second}.get(letter, first + second)


def _attention(config: ModelConfig, block: int) -> Attention | LatentAttention:
    flash = config.attention == "flash"
    if config.kv_lora_rank is not None:
        plain, rotated, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        return LatentAttention(
            config.heads,
            config.q_lora_rank,
            config.kv_lora_rank,
            plain or 0,
            rotated or 0,
            values or 0,
            flash,
            config.causal,
        )
    return Attention(
        config.heads,
        config.n_kv_heads,
        config.width_of_head,
        config.has_qkv_bias,
        config.qk_norm,
        config.positions == "rotary",
        flash,
        config.causal,
        config.window if config.has_window(block) else None,
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
    )


def _vision(vision: VisionConfig, config: ModelConfig, model: Stream) -> VisionEncoder:
    """Its blocks have LayerNorm and biases, attend to all patches, and keep no scores."""
    stream = Stream(vision.hidden, model.dtype_bytes, 2, True, False, model.product_dtype)
    width = vision.hidden // vision.heads
    attention = Attention(vision.heads, vision.heads, width, True, rotary=False, causal=False)
    ffn = 4 * vision.hidden if vision.ffn is None else vision.ffn
    return VisionEncoder(
        stream,
        vision.patches,
        vision.images,
        Patches(vision.patch_values),
        (("attention", attention), ("mlp", Mlp(ffn, vision.gated))),
        vision.layers,
        Projector(vision.merged, config.hidden),
    )
