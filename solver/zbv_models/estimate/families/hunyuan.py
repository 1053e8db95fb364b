"""Hunyuan (Tencent)."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind


def _translate(document: Section) -> Section:
    """The models' files name the width of experts twice."""
    width = document.get("expert_hidden_dim")
    others = {key: value for key, value in document.items() if key != "expert_hidden_dim"}
    return others if width is None else {"moe_intermediate_size": width, **others}


TEXT = {
    "hunyuan_v1_dense": TextKind({"bias": False, "qk_norm": True}),
    "hy_v3": TextKind(
        {"bias": False, "qk_norm": True},
        computed={"first_k_dense_replace": 1},
        without_effect="enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine "
        "moe_router_use_sigmoid route_norm router_scaling_factor use_grouped_mm",
        translate=_translate,
    ),
}
