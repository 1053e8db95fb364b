"""Granite (IBM), and Bamba, whose Mamba-2 layers Granite 4 has."""

from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_mixers import mamba

MOE = TextKind({"bias": False}, expert_width="intermediate_size")


def _first(keys: Keys, count: int) -> str:
    places = keys.places(count, "attn_layer_indices")
    return "".join("*" if place in places else "M" for place in range(count))


TEXT = {
    "bamba": TextKind(state_space=mamba, first=_first, without_effect="z_loss_coefficient"),
    "granite": TextKind(),
    "granitemoe": MOE,
    "granitemoehybrid": TextKind(
        {"bias": False}, state_space=mamba, first=_first, expert_width="intermediate_size"
    ),
    "granitemoeshared": MOE,
}
