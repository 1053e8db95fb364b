"""Jamba (AI21, Lieber et al. 2024, arXiv 2403.19887): Mamba, attention and experts in periods."""

from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_mixers import selective_scan


def _letters(keys: Keys, count: int, name: str, letters: str) -> str:
    """The first letter for blocks of a period, the second one for others."""
    period, offset = keys.number(f"{name}_layer_period"), keys.count(f"{name}_layer_offset")
    return "".join(letters[0] if place % period == offset else letters[1] for place in range(count))


TEXT = {
    "jamba": TextKind(
        {"positions": "none"},
        state_space=selective_scan,
        first=lambda keys, count: _letters(keys, count, "attn", "*M"),
        second=lambda keys, count: _letters(keys, count, "expert", "E-"),
        expert_width="intermediate_size",
        without_effect="use_associative_scan use_mambapy",
    ),
}
