"""MiniMax: lightning attention in Text-01 and M1 (MiniMax 2025), none in M2, blocks of chosen keys in M3.

The types ``minimax_text_01``, ``minimax_m1`` and ``minimax_m3`` are those of the models' repositories.
"""

from itertools import product

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind, Wrapper
from zbv_models.estimate.transformers_mixers import lightning

OLD = ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks")
NEW = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
OTHERS = (
    *("use_sparse_attention", "sparse_attention_freq", "sparse_disable_index_value"),
    *("sparse_init_block", "sparse_local_block", "sparse_score_type"),
)
SCALED = (
    *("full_attn", "linear_attn", "mlp", "layernorm_full_attention", "layernorm_linear_attention"),
    "layernorm_mlp",
)
ENDS = ("alpha", "beta", "alpha_factor", "beta_factor")
"""The two summands of a residual have factors."""


def _first(keys: Keys, count: int) -> str:
    return "".join("M" if place % 2 else "*" for place in range(count))


def _chosen(keys: Keys, count: int) -> str:
    """Blocks whose indexer chooses pieces of the sequence."""
    inside = keys.inside("sparse_attention_config")
    if not inside.has("sparse_attention_freq"):
        return "*" * count
    return "".join("I" if each else "*" for each in inside.listed(count, "sparse_attention_freq"))


def _more(keys: Keys) -> Section:
    inside = keys.inside("sparse_attention_config")
    for name in OTHERS:
        inside.get(name)
    heads, width, size, pieces = (
        inside.size(old) or keys.number(new) for old, new in zip(OLD, NEW, strict=True)
    )
    keys.get("index_local_blocks")
    listed = keys.get("layer_types") or inside.get("sparse_attention_freq")
    if not isinstance(listed, list) or not {1, "minimax_m3_sparse"}.intersection(listed):
        return {}
    return {"index_heads": heads, "index_dim": width, "window": size * pieces}


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
M3 = TextKind(
    NORMED,
    first=_chosen,
    mixers={"full_attention": "*", "minimax_m3_sparse": "I"},
    expert_width="intermediate_size",
    dense_width="dense_intermediate_size",
    defaults="minimax_m3_vl_text",
    more=_more,
)
TEXT = {
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), M1),
    "minimax_m2": TextKind(NORMED, mixers={1: "*"}, expert_width="intermediate_size"),
    "minimax_m3": M3,
    "minimax_m3_vl_text": M3,
}
WRAPPERS = {"minimax_m3_vl": Wrapper("minimax_m3_vl_text", flat=True)}
