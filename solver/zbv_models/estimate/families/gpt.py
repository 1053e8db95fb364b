"""GPT and models with its blocks; gpt-oss (OpenAI 2025), whose attention sinks are left out."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind

GPT: Section = {"gated": False, "norm": "layernorm", "bias": True, "qkv_bias": True}
TEXT = {
    "bloom": TextKind({**GPT, "positions": "none"}),
    "gpt2": TextKind({**GPT, "positions": "learned"}),
    "gpt_neox": TextKind(GPT),
    "gpt_oss": TextKind({"bias": True}, "alternate", full_every=2, expert_width="intermediate_size"),
    "phi": TextKind(GPT),
    "stablelm": TextKind({"norm": "layernorm", "bias": False}),
    "starcoder2": TextKind(
        {"gated": False, "norm": "layernorm"}, window="all", without_effect="mlp_type norm_type"
    ),
}
