"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692) and Kimi K3 (Kimi Team 2026, arXiv 2607.24653).

Most blocks have delta attention, the others latent attention. K3 adds gates to both, latent experts, and
attention residuals, which read the sums of every ``attn_res_block_size`` blocks. The repositories' files have
the object ``linear_attn_config``, which counts blocks from 1; transformers has other keys.
"""

from zbv_models.estimate.recurrent import KimiDelta
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind, Wrapper


def _first(keys: Keys, count: int) -> str:
    inside = keys.inside("linear_attn_config")
    full, delta = (inside.places(count, name, first=1) for name in ("full_attn_layers", "kda_layers"))
    if not full and not delta:
        full = [place for place in range(1, count) if place % 4 == 0]
    return "".join("*" if place in full else "M" for place in range(count))


def _delta(keys: Keys) -> Section:
    inside = keys.inside("linear_attn_config")
    for name in ("full_attn_layers", "kda_layers", "gate_lower_bound"):
        inside.get(name)
    return KimiDelta(
        keys.number("hidden_size"),
        inside.size("num_heads") or keys.number("linear_num_heads"),
        inside.size("head_dim") or keys.number("linear_head_dim"),
        inside.size("short_conv_kernel_size") or keys.number("linear_conv_kernel_dim"),
        full_gates=int(inside.flag("use_full_rank_gate")),
    ).costs()


def _more(keys: Keys) -> Section:
    size, count = keys.size("attn_res_block_size"), keys.number("num_hidden_layers")
    gate = keys.flag("mla_use_output_gate")
    return {"output_gate": gate, "residual_sums": 1 + -(-count // size) // 2 if size else None}


TEXT = {
    "kimi_linear": TextKind(
        {"bias": False, "qkv_bias": False},
        state_space=_delta,
        first=_first,
        computed={"first_k_dense_replace": 1},
        without_effect="activation_situ_beta activation_situ_linear_beta latent_moe_use_norm",
        more=_more,
    ),
}
WRAPPERS = {"kimi_k3": Wrapper("kimi_linear")}
