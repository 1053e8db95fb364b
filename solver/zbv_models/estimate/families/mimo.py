"""MiMo (Xiaomi 2025): MiMo-7B has Qwen2's blocks, MiMo-V2 a window in most blocks, with more key heads.

``mimo`` and ``mimo_v2`` are types of the models' repositories, whose files say the sizes of blocks with a
window (``swa_...``); in transformers, they have twice as many key heads.
"""

from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind, Wrapper
from zbv_models.estimate.transformers_text import PREDICTIONS

SIZES = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
         "value_dim": "v_head_dim"}  # fmt: skip


def _first(_: Keys, count: int) -> str:
    return "".join("*" if place == 0 or (place + 1) % 6 == 0 else "W" for place in range(count))


def _vary(keys: Keys, blocks: Blocks) -> Blocks:
    sizes = {key: keys.size(f"swa_{name}") for key, name in SIZES.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or 2 * keys.number("num_key_value_heads")
    return blocks.varied(0, blocks.places(0, "W"), **sizes)


V2 = TextKind(
    {"bias": False},
    window="all",
    mixers={"full_attention": "*", "sliding_attention": "W", 0: "*", 1: "W"},
    first=_first,
    computed={"first_k_dense_replace": 1},
    defaults="mimo_v2_flash",
    without_effect=(
        "add_full_attention_sink_bias add_swa_attention_sink_bias attention_chunk_size "
        "attention_projection_layout hybrid_block_size sliding_window_size"
    ),
    vary=_vary,
    more=lambda keys: {"prediction_pattern": "(W-)" if keys.count(*PREDICTIONS) else None},
)
TEXT = {
    "mimo": TextKind({"bias": False}, window="switch", defaults="qwen2"),
    "mimo_v2": V2,
    "mimo_v2_flash": V2,
}
WRAPPERS = {"mimo_v2": Wrapper("mimo_v2", flat=True), "mimo_v2_omni": Wrapper("mimo_v2", flat=True)}
