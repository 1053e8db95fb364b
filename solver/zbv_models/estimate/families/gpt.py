"""GPT and models with its blocks; gpt-oss (OpenAI 2025), whose attention sinks are left out."""

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind

GPT: Section = {"gated": False, "norm": "layernorm", "bias": True, "qkv_bias": True}


def _shared_head(document: Section) -> Section:
    """StarCoder: one head of keys and values, or as many as of queries."""
    rest = {key: value for key, value in document.items() if key != "multi_query"}
    flag = document.get("multi_query", True)
    if not isinstance(flag, bool):
        raise InvalidInput.at("/multi_query", f"found {quoted(flag)}; must be true or false.")
    return {**rest, "num_key_value_heads": 1} if flag else rest


TEXT = {
    "bloom": TextKind({**GPT, "positions": "none"}),
    "gpt2": TextKind({**GPT, "positions": "learned"}),
    "gpt_bigcode": TextKind(
        {**GPT, "positions": "learned"},
        translate=_shared_head,
        without_effect="scale_attention_softmax_in_fp32 inference_runner validate_runner_input "
        "pad_key_length pre_allocate_kv_cache max_batch_size",
    ),
    "gpt_neox": TextKind({"gated": False, "norm": "layernorm", "bias": True}),
    "gpt_oss": TextKind({"bias": True}, "alternate", full_every=2, expert_width="intermediate_size"),
    "gptj": TextKind({"gated": False, "norm": "layernorm", "bias": True}),
    "phi": TextKind(GPT),
    "stablelm": TextKind({"norm": "layernorm", "bias": False}),
    "starcoder2": TextKind(
        {"gated": False, "norm": "layernorm"}, window="all", without_effect="mlp_type norm_type"
    ),
}
