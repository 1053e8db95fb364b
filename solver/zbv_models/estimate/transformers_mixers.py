"""Layers of several families from the keys of a ``config.json``: periods, and costs without attention."""

from __future__ import annotations

from zbv_models.estimate.recurrent import (
    DeltaNet,
    LightningAttention,
    Mamba,
    SelectiveScan,
    ShortConvolution,
)
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys


def every_fourth(_: Keys, count: int) -> str:
    """Blocks with a window, but for the first of every four."""
    return "".join("W" if place % 4 else "*" for place in range(count))


def mamba(keys: Keys) -> Section:
    """Mamba-2, under the names of Nemotron-H and under those of Bamba."""
    heads, hidden = keys.number("mamba_num_heads", "mamba_n_heads"), keys.number("hidden_size")
    names, expand = ("mamba_head_dim", "mamba_d_head"), keys.size("expand", "mamba_expand") or 2
    for name in ("use_conv_bias", "mamba_conv_bias", "mamba_proj_bias"):
        keys.get(name)
    is_free = keys.get(*names) in (None, "auto")
    width = expand * hidden // heads if is_free else keys.number(*names)
    return Mamba(
        hidden,
        heads=heads,
        inner=heads * width,
        state=keys.number("ssm_state_size", "mamba_d_state"),
        groups=keys.number("n_groups", "mamba_n_groups"),
        kernel=keys.number("conv_kernel", "mamba_d_conv"),
        chunk=keys.number("chunk_size", "mamba_chunk_size"),
    ).costs()


def selective_scan(keys: Keys) -> Section:
    """Mamba, under the names of Jamba."""
    hidden, rank = keys.number("hidden_size"), "mamba_dt_rank"
    for name in ("mamba_conv_bias", "mamba_proj_bias"):
        keys.get(name)
    return SelectiveScan(
        hidden,
        keys.number("mamba_expand") * hidden,
        keys.number("mamba_d_state"),
        -(-hidden // 16) if keys.get(rank) in (None, "auto") else keys.number(rank),
        keys.number("mamba_d_conv"),
    ).costs()


def delta_net(keys: Keys) -> Section:
    """Gated delta nets, under the names of Qwen3-Next."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = (keys.number(f"linear_{name}") for name in names)
    return DeltaNet(keys.number("hidden_size"), *sizes).costs()


def lightning(keys: Keys) -> Section:
    """Lightning attention, under the names of MiniMax."""
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    return LightningAttention(
        hidden, heads, keys.size("head_dim") or hidden // heads, keys.number("block_size")
    ).costs()


def short_convolution(keys: Keys) -> Section:
    """A gated short convolution, under the names of LFM2."""
    bias = keys.flag("conv_bias")
    return ShortConvolution(keys.number("hidden_size"), keys.number("conv_L_cache"), bias).costs()
