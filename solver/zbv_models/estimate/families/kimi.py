"""Kimi K2 and Kimi-VL (Moonshot AI), which have the blocks of DeepSeek-V3.

The types ``kimi_k2`` and ``kimi_vl`` are those of the models' repositories.
"""

from typing import Any

from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper

MERGED: dict[str, Any] = {"merged": "merge_kernel_size", "projector": ("merged",)}
TEXT = {"kimi_k2": TextKind({"bias": False, "qkv_bias": False}, defaults="deepseek_v3")}
VISION = {
    "kimi_k25_vision": VisionKind({"positions": "both"}),
    "moonvit": VisionKind({"positions": "both"}),
}
WRAPPERS = {
    "kimi_k25": Wrapper("deepseek_v3", "kimi_k25_vision", **MERGED),
    "kimi_vl": Wrapper("deepseek_v3", "moonvit", **MERGED),
}
