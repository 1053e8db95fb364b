"""Gemma 1 to 3 (Google)."""

from zbv_models.estimate.transformers_kinds import TextKind, VisionKind, Wrapper

TEXT = {
    "gemma": TextKind(),
    "gemma2": TextKind({"post_norms": True}, window="alternate", full_every=2),
    "gemma3_text": TextKind({"post_norms": True, "qk_norm": True}, window="alternate", full_every=6),
    "vaultgemma": TextKind(window="alternate", full_every=2),
}
VISION = {"siglip_vision_model": VisionKind()}
WRAPPERS = {
    "gemma3": Wrapper(
        "gemma3_text", "siglip_vision_model", merged="mm_tokens_per_image", projector=(), pooled=True
    ),
}
