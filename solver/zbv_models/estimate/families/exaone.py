"""EXAONE 4 and K-EXAONE (LG AI Research)."""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_kinds import TextKind


def _translate(document: Section) -> Section:
    """The repository's file says twice which blocks have experts."""
    listed = document.get("is_moe_layer")
    others = {key: value for key, value in document.items() if key != "is_moe_layer"}
    return others if listed is None else {**others, "moe_layer_freq": listed}


TEXT = {
    "exaone4": TextKind({"qk_norm": True}, window="alternate", full_every=4),
    "exaone_moe": TextKind({"qk_norm": True}, window="alternate", full_every=4, translate=_translate),
}
