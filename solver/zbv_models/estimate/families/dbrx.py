"""DBRX (Databricks 2024), whose file has the sizes of attention and of experts in separate objects."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind

WITHOUT_EFFECT = (
    *("attn_pdrop", "ffn_act_fn", "moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights"),
    *("tie_word_embeddings", "uniform_expert_assignment"),
)


def _more(keys: Keys) -> Section:
    attention, experts = keys.inside("attn_config"), keys.inside("ffn_config")
    for name in WITHOUT_EFFECT:
        attention.get(name), experts.get(name)
    hidden, width = keys.number("d_model"), experts.size("hidden_size")
    if width not in (None, hidden):
        raise experts.wrong("hidden_size", f"found {width}; must be d_model ({hidden}). Correct one of them.")
    return {
        "kv_heads": attention.count("kv_n_heads", null=1, least=1),
        "experts": experts.count("moe_num_experts", null=4, least=1),
        "experts_per_token": experts.count("moe_top_k", null=1, least=1),
        "expert_ffn": experts.count("ffn_hidden_size", null=3584, least=1),
    }


TEXT = {
    "dbrx": TextKind(
        {"norm": "layernorm"},
        blocks=lambda keys, count: Blocks(("*E",) * count),
        more=_more,
    ),
}
