"""Qwen 2 to 3.6 (Alibaba), and models with blocks of Qwen3; from Qwen3-Next on with gated delta nets."""

from typing import Any

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper
from zbv_models.estimate.transformers_mixers import delta_net

QWEN2: Section = {"bias": False, "qkv_bias": True}
NORMED: Section = {"qk_norm": True}
GATED: Section = {"qk_norm": True, "output_gate": True, "shared_expert_gate": True}
TEXT = {
    **dict.fromkeys(("dots1", "qwen3", "qwen3_moe"), TextKind(NORMED, window="switch")),
    **dict.fromkeys(("qwen2", "qwen2_5_vl_text", "qwen2_vl_text"), TextKind(QWEN2, window="switch")),
    "qwen2_moe": TextKind({**QWEN2, "shared_expert_gate": True}, window="switch"),
    **dict.fromkeys(("mellum", "qwen3_vl_moe_text", "qwen3_vl_text"), TextKind(NORMED)),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        TextKind(GATED, state_space=delta_net, full_every=4),
    ),
}
BOTH, ROTATED = VisionKind({"positions": "both"}), {"positions": "rotary"}
VISION = {
    "qwen2_5_vl_vision": VisionKind({"norm": "rmsnorm", "gated": True, **ROTATED}),
    "qwen2_vl_vision": VisionKind(ROTATED, width=("embed_dim",), ffn=("mlp_ratio",)),
    "qwen3_5_moe_vision": BOTH,
    "qwen3_5_vision": BOTH,
    "qwen3_vl_moe_vision": BOTH,
    "qwen3_vl_vision": BOTH,
}
SQUARE: dict[str, Any] = {"merged": "spatial_merge_size", "projector": ("merged",)}
OLDER: dict[str, Any] = {**SQUARE, "flat": True, "tied": "either"}
WRAPPERS = {
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", "qwen2_5_vl_vision", **OLDER),
    "qwen2_vl": Wrapper("qwen2_vl_text", "qwen2_vl_vision", **OLDER),
    **{
        name: Wrapper(f"{name}_text", f"{name}_vision", **SQUARE)
        for name in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
    },
}
