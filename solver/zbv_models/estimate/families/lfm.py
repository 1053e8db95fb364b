"""LFM2 (Liquid AI 2025, arXiv 2511.23404): short convolutions in most blocks."""

from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_mixers import short_convolution

MIXERS = {"full_attention": "*", "conv": "M"}


def _first(keys: Keys, count: int) -> str:
    places = keys.places(count, "full_attn_idxs") if keys.has("full_attn_idxs") else range(count)
    return "".join("*" if place in places else "M" for place in range(count))


TEXT = {
    "lfm2_moe": TextKind(
        {"qk_norm": True},
        state_space=short_convolution,
        first=_first,
        mixers=MIXERS,
        without_effect="use_expert_bias",
    ),
}
