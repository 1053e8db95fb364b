"""MiniMax M3 (MiniMax 2026): an indexer chooses pieces of the sequence for groups of heads.

The type ``minimax_m3`` is that of the model's repository.
"""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind, Wrapper

OLD = ("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks")
NEW = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
OTHERS = (
    *("use_sparse_attention", "sparse_attention_freq", "sparse_disable_index_value"),
    *("sparse_init_block", "sparse_local_block", "sparse_score_type"),
)


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
    if not isinstance(listed, list) or not any(each in (1, "minimax_m3_sparse") for each in listed):
        return {}
    return {"index_heads": heads, "index_dim": width, "window": size * pieces}


M3 = TextKind(
    {"bias": False, "qkv_bias": False, "qk_norm": True},
    first=_chosen,
    mixers={"full_attention": "*", "minimax_m3_sparse": "I"},
    expert_width="intermediate_size",
    dense_width="dense_intermediate_size",
    defaults="minimax_m3_vl_text",
    more=_more,
)
TEXT = {"minimax_m3": M3, "minimax_m3_vl_text": M3}
WRAPPERS = {"minimax_m3_vl": Wrapper("minimax_m3_vl_text", flat=True)}
