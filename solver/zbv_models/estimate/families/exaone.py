"""EXAONE (LG AI Research)."""

from zbv_models.estimate.transformers_kinds import TextKind

TEXT = {
    "exaone4": TextKind({"qk_norm": True}, window="alternate", full_every=4),
    "exaone_moe": TextKind({"qk_norm": True}, window="alternate", full_every=4),
}
