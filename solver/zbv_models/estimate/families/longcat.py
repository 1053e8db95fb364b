"""LongCat-Flash (Meituan 2025, arXiv 2509.01322): two blocks per layer, the first of which has experts.

The experts compute next to the first MLP, which counts as a shared expert. Some experts of the router compute
nothing (§2.1): of those that a token is sent to, as many are real as there are among all.
"""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind


def _blocks(_: Keys, count: int) -> Blocks:
    return Blocks(("*E", "*-") * count)


def _more(keys: Keys) -> Section:
    experts, empty = keys.number("n_routed_experts"), keys.count("zero_expert_num")
    chosen = round(keys.number("moe_topk") * experts / (experts + empty))
    return {"shared_expert_ffn": keys.number("ffn_hidden_size"), "experts_per_token": max(1, chosen)}


TEXT = {
    "longcat_flash": TextKind(
        expert_width="expert_ffn_hidden_size",
        dense_width="ffn_hidden_size",
        blocks=_blocks,
        more=_more,
        without_effect="attention_method mla_scale_kv_lora mla_scale_q_lora router_bias zero_expert_type",
    ),
}
