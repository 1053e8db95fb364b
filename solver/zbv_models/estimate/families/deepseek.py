"""DeepSeekMoE, DeepSeek-V2 to V3.2, and models with their blocks: latent attention, experts, an indexer."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind

UNBIASED: Section = {"bias": False, "qkv_bias": False}
TEXT = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), TextKind(UNBIASED)),
    "deepseek": TextKind(UNBIASED),  # of the model's repository
    "axk1": TextKind(UNBIASED, computed={"first_k_dense_replace": 1}),
    "youtu": TextKind(UNBIASED, without_effect="embedding_initializer_range"),
}
