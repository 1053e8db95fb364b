"""Gemma 4 (Google 2026): other heads in blocks without a window, per-layer inputs, experts and an MLP."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind, VisionKind, Wrapper


def _first(_: Keys, count: int) -> str:
    """The last block has no window either."""
    return "".join("*" if (at + 1) % 6 == 0 or at == count - 1 else "W" for at in range(count))


def _vary(keys: Keys, blocks: Blocks) -> Blocks:
    """Blocks without a window have wider heads; the last blocks read keys and values of earlier ones."""
    is_equal, every = keys.flag("attention_k_eq_v"), blocks.places(0, "*")
    groups = keys.size("num_global_key_value_heads")
    width = keys.size("global_head_dim") or 512
    if keys.get("per_layer_config") is None:
        blocks = blocks.varied(0, every, head_dim=width, kv_heads=groups if is_equal else None)
    blocks = blocks.varied(0, every, shared_values=is_equal or None)
    last = range(len(blocks.letters))[len(blocks.letters) - keys.count("num_kv_shared_layers") :]
    blocks = blocks.varied(0, last, reads_keys=True)
    if keys.flag("use_double_wide_mlp"):
        blocks = blocks.varied(1, last, ffn=2 * keys.number("intermediate_size"))
    return blocks


def _translate(document: Section) -> Section:
    """The MLP next to experts is a shared expert; without experts, their sizes have no effect."""
    of_experts = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if document.get("enable_moe_block") is True and document.get("num_experts"):
        return {**document, "shared_expert_intermediate_size": document.get("intermediate_size", 9216)}
    return {key: value for key, value in document.items() if key not in of_experts}


def _more(keys: Keys) -> Section:
    keys.get("enable_moe_block")
    width, rows = keys.count("hidden_size_per_layer_input"), keys.size("vocab_size_per_layer_input")
    return {"layer_inputs": width, "layer_vocabulary": rows} if width else {}


TEXT = {
    "gemma4_text": TextKind(
        {"bias": False, "qk_norm": True, "post_norms": True},
        window="all",
        first=_first,
        translate=_translate,
        vary=_vary,
        more=_more,
    ),
}
TEXT |= {"gemma4_unified_text": TEXT["gemma4_text"]}
SEEING: Section = {"norm": "rmsnorm", "bias": False, "gated": True, "positions": "both"}
VISION = {"gemma4_vision": VisionKind(SEEING)}
WRAPPERS = {
    "gemma4": Wrapper(
        "gemma4_text", "gemma4_vision", merged="pooling_kernel_size", projector=(), pooled=True
    ),
    "gemma4_unified": Wrapper("gemma4_unified_text"),
}
