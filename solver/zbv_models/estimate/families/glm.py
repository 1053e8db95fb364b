"""GLM (Zhipu AI); GLM-5 has the sparse attention of DeepSeek-V3.2."""

from typing import Any

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper

SEEING: Section = {
    "norm": "rmsnorm",
    "bias": False,
    "gated": True,
    "positions": "both",
    "projector_gated": True,
}
DOWNSAMPLED: dict[str, Any] = {
    "merged": "spatial_merge_size",
    "projector": ("out_hidden_size", "out_hidden_size", "intermediate_size"),
    "flat": True,
}
"""A convolution that merges patches, a matrix, and an MLP with a gate."""
TEXT = {
    **dict.fromkeys(("glm", "glm4_moe", "glm4v_moe_text"), TextKind({"bias": False})),
    "glm4": TextKind({"bias": False, "post_norms": True}),
    "glm4_moe_lite": TextKind({"bias": False, "qkv_bias": False}, computed={"first_k_dense_replace": 1}),
    "glm4v_text": TextKind({"bias": False, "qkv_bias": True, "post_norms": True}),
    "glm_moe_dsa": TextKind({"bias": False, "qkv_bias": False}),
}
VISION = {
    "glm4v_moe_vision": VisionKind(SEEING, ffn=("out_hidden_size",)),
    "glm4v_vision": VisionKind(SEEING, ffn=("out_hidden_size",)),
}
WRAPPERS = {
    "glm46v": Wrapper("glm4v_text", "glm4v_vision", **DOWNSAMPLED),
    "glm4v": Wrapper("glm4v_text", "glm4v_vision", **DOWNSAMPLED, tied="either"),
    "glm4v_moe": Wrapper("glm4v_moe_text", "glm4v_moe_vision", **DOWNSAMPLED, tied="either"),
}
