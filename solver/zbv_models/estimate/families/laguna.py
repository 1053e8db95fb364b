"""Laguna (Poolside): heads per block, and a gate per head."""

from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind


def _vary(keys: Keys, blocks: Blocks) -> Blocks:
    if keys.get("num_attention_heads_per_layer") is None:
        return blocks
    heads = keys.listed(len(blocks.letters), "num_attention_heads_per_layer")
    if any(type(each) is not int or each < 1 for each in heads):
        raise keys.wrong("num_attention_heads_per_layer", "must be a list of whole numbers above 0.")
    for count in sorted(set(heads) - {keys.number("num_attention_heads")}):
        blocks = blocks.varied(0, [at for at, each in enumerate(heads) if each == count], heads=count)
    return blocks


TEXT = {
    "laguna": TextKind(
        {"bias": False, "qk_norm": True},
        window="all",
        first=lambda _, count: "*" * count,
        computed={"first_k_dense_replace": 1},
        without_effect="moe_apply_router_weight_on_input moe_router_logit_softcapping "
        "moe_routed_scaling_factor",
        vary=_vary,
        more=lambda keys: {"output_gate" if keys.get("gating") == "per-element" else "head_gate": True},
    ),
}
