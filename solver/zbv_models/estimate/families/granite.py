"""Granite (IBM), and Bamba, whose Mamba-2 layers Granite 4 has; attention sinks are left out."""

from dataclasses import replace
from typing import Any

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_mixers import every_fourth, mamba

MOE = TextKind({"bias": False}, expert_width="intermediate_size")
WINDOWED: dict[str, Any] = {
    "window": "all",
    "first": every_fourth,
    "without_effect": "layer_rope_theta",
}


def _first(keys: Keys, count: int) -> str:
    places = keys.places(count, "attn_layer_indices")
    return "".join("*" if place in places else "M" for place in range(count))


def _hybrid(document: Section) -> Section:
    """Without experts, a block's MLP is what is a shared expert otherwise; keys of layers that are not."""
    without = {key: value for key, value in document.items() if not key.startswith("mamba_")}
    names = document.get("layer_types")
    document = without if isinstance(names, list) and set(map(str, names)) == {"attention"} else document
    if document.get("num_local_experts") != 0:
        return document
    width = document.get("shared_intermediate_size", 1024)
    of_experts = ("num_experts_per_tok", "shared_intermediate_size")
    return {key: value for key, value in document.items() if key not in of_experts} | {
        "intermediate_size": width
    }


TEXT = {
    "bamba": TextKind(state_space=mamba, first=_first, without_effect="z_loss_coefficient"),
    "granite": TextKind(),
    "granite_swa": TextKind(**WINDOWED),
    "granitemoe": MOE,
    "granitemoe_swa": replace(MOE, **WINDOWED),
    "granitemoehybrid": TextKind(
        {"bias": False},
        state_space=mamba,
        first=_first,
        expert_width="intermediate_size",
        translate=_hybrid,
    ),
    "granitemoeshared": MOE,
}
