"""Hunyuan (Tencent)."""

from zbv_models.estimate.transformers_kinds import TextKind

TEXT = {
    "hunyuan_v1_dense": TextKind({"bias": False, "qk_norm": True}),
    "hy_v3": TextKind(
        {"bias": False, "qk_norm": True},
        computed={"first_k_dense_replace": 1},
        without_effect="enable_moe_fp32_combine router_scaling_factor",
    ),
}
