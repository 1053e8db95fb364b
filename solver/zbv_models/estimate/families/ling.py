"""Ling and Ring (inclusionAI): attention of groups, or delta attention in most blocks and the rest latent.

The types ``bailing_moe`` and ``bailing_moe_v2`` are those of the models' repositories.
"""

from zbv_models.estimate.recurrent import KimiDelta
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind


def _first(keys: Keys, count: int) -> str:
    every = keys.number("layer_group_size")
    return "".join("*" if (place + 1) % every == 0 else "M" for place in range(count))


def _delta(keys: Keys) -> Section:
    heads, width = keys.number("num_attention_heads"), keys.size("linear_head_dim")
    width, kernel = width or keys.number("head_dim"), keys.number("short_conv_kernel_size")
    return KimiDelta(keys.number("hidden_size"), heads, width, kernel, full_gates=2).costs()


GROUPED = TextKind(
    {"bias": False},
    without_effect="max_window_layers mtp_loss_scaling_factor norm_head norm_softmax router_dtype "
    "score_function using_split_qkv_in_self_attention",
)
TEXT = {
    "bailing_moe": GROUPED,
    "bailing_moe_v2": GROUPED,
    "bailing_hybrid": TextKind(
        {"bias": False, "qkv_bias": False, "head_gate": True},
        state_space=_delta,
        first=_first,
        without_effect="kda_lower_bound kda_safe_gate layer_group_size linear_conv_kernel_dim "
        "linear_num_heads mtp_loss_scaling_factor short_conv_kernel_size",
    ),
}
