"""Hunyuan (Tencent): dense models, the mixtures A13B (``hunyuan_v1_moe``) and Hy3 (``hy_v3``)."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind

OF_BLOCKS = ("moe_intermediate_size", "moe_topk", "num_experts", "num_shared_expert")
"""Keys of which files have a list of equal numbers, one per block."""


def _translate(document: Section) -> Section:
    """The models' files name the width of experts twice."""
    width = document.get("expert_hidden_dim")
    others = {key: value for key, value in document.items() if key != "expert_hidden_dim"}
    return others if width is None else {"moe_intermediate_size": width, **others}


def _mixture(document: Section) -> Section:
    found = dict(document)
    for key in OF_BLOCKS:
        value = found.get(key)
        if isinstance(value, list) and value and value[1:] == value[:-1]:
            found[key] = value[0]
    found["num_shared_experts"] = found.pop("num_shared_expert", 1)
    if found.get("use_mixed_mlp_moe") is True:  # no file of a mixture has another value
        del found["use_mixed_mlp_moe"]
    return {"moe_intermediate_size": found.get("intermediate_size", 11008), **found}


def _dense(document: Section) -> Section:
    """The single expert of a block is its MLP."""
    found = _mixture(document)
    if found.get("num_experts") in (None, 1):
        of_experts = (*OF_BLOCKS, "num_shared_experts", "use_mixed_mlp_moe")
        found = {key: value for key, value in found.items() if key not in of_experts}
    return found


WITHOUT_EFFECT = (
    "add_classification_head cla_share_factor class_num dense_list eod_token_id group_limited_greedy "
    "im_end_id im_newline_id im_start_id mask_init_id moe_drop_tokens moe_layer_num_skipped "
    "moe_random_routing_dropped_token norm_type org_vocab_size pad_id pool_type text_end_id text_start_id "
    "use_rotary_pos_emb"
)
NORMED: Section = {"bias": False, "qk_norm": True}
TEXT = {
    "hunyuan_v1_dense": TextKind(NORMED, without_effect=WITHOUT_EFFECT, translate=_dense),
    "hunyuan_v1_moe": TextKind(NORMED, without_effect=WITHOUT_EFFECT, translate=_mixture),
    "hy_v3": TextKind(
        NORMED,
        computed={"first_k_dense_replace": 1},
        without_effect="enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine "
        "moe_router_use_sigmoid route_norm router_scaling_factor use_grouped_mm",
        translate=_translate,
    ),
}
