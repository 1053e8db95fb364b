"""OLMo (Allen Institute for AI)."""

from zbv_models.estimate.recurrent import DeltaNet
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind


def _delta(keys: Keys) -> Section:
    """Gated delta nets with as many heads as attention; keys have three quarters of the model's width."""
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    of_keys = keys.size("linear_num_key_heads") or heads
    width = keys.size("linear_key_head_dim") or int(0.75 * hidden / of_keys)
    return DeltaNet(
        hidden,
        of_keys,
        keys.size("linear_num_value_heads") or heads,
        width,
        keys.size("linear_value_head_dim") or 2 * width,
        keys.number("linear_conv_kernel_dim"),
    ).costs()


TEXT = {
    "olmo_hybrid": TextKind(
        {"qk_norm": True},
        state_space=_delta,
        full_every=4,
        without_effect="linear_a_log_max linear_a_log_min linear_allow_neg_eigval linear_dt_init_floor "
        "linear_dt_max linear_dt_min",
    ),
    "flex_olmo": TextKind({"qk_norm": True}, expert_width="intermediate_size"),
    "olmo2": TextKind({"qk_norm": True}),
    "olmo3": TextKind({"qk_norm": True}, window="alternate", full_every=4),
    "olmoe": TextKind({"qk_norm": True}, expert_width="intermediate_size"),
}
