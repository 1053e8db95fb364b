"""MiniMax: lightning attention in Text-01 and M1 (MiniMax 2025), and none in M2.

The types ``minimax_text_01`` and ``minimax_m1`` are those of the models' repositories.
"""

from itertools import product

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_mixers import lightning

SCALED = (
    *("full_attn", "linear_attn", "mlp", "layernorm_full_attention", "layernorm_linear_attention"),
    "layernorm_mlp",
)
ENDS = ("alpha", "beta", "alpha_factor", "beta_factor")
"""The two summands of a residual have factors."""


def _first(keys: Keys, count: int) -> str:
    return "".join("M" if place % 2 else "*" for place in range(count))


M1 = TextKind(
    {"bias": False, "qkv_bias": False},
    state_space=lightning,
    first=_first,
    mixers={"full_attention": "*", "linear_attention": "M", 1: "*", 0: "M"},
    expert_width="intermediate_size",
    defaults="minimax",
    without_effect="postnorm rotary_dim shared_moe_mode "
    + " ".join(f"{which}_{end}" for which, end in product(SCALED, ENDS)),
)
NORMED: Section = {"bias": False, "qkv_bias": False, "qk_norm": True}
TEXT = {
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), M1),
    "minimax_m2": TextKind(NORMED, mixers={1: "*"}, expert_width="intermediate_size"),
}
