"""Mistral, Mixtral, Ministral and Phi-3, which has their blocks; Pixtral's encoder."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper

UNBIASED: Section = {"bias": False, "qkv_bias": False}
TEXT = {
    **dict.fromkeys(("ministral", "ministral3", "mistral"), TextKind(UNBIASED, window="all")),
    "phi3": TextKind(UNBIASED, window="all", without_effect="full_attn_mod interpolate_factor"),
    "mistral4": TextKind(UNBIASED),
    "mixtral": TextKind(UNBIASED, window="all", expert_width="intermediate_size"),
}
VISION = {
    "pixtral": VisionKind({"norm": "rmsnorm", "bias": False, "gated": True, "positions": "rotary"}),
}
WRAPPERS = {
    "mistral3": Wrapper("mistral", "pixtral", merged="spatial_merge_size", projector=("patch", "model")),
}
