"""LFM2 (Liquid AI 2025, arXiv 2511.23404): short convolutions in most blocks."""

from zbv_solver.documents.validation import quoted

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys, defaults
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_mixers import short_convolution

ADJUSTED = ("block_ff_dim", "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier")
OF_BLOCKS = (
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu conv_dim "
    "block_use_xavier_init conv_dim_out conv_use_xavier_init num_heads theta use_pos_enc"
)
"""Keys of published files that transformers does not use."""
MIXERS = {"full_attention": "*", "conv": "M"}


def _first(keys: Keys, count: int) -> str:
    places = keys.places(count, "full_attn_idxs") if keys.has("full_attn_idxs") else range(count)
    return "".join("*" if place in places else "M" for place in range(count))


def _adjusted(document: Section) -> Section:
    """The width of MLPs that transformers makes of the file's (``Lfm2MLP``)."""
    keys = Keys(document, defaults()["lfm2"])
    width, multiple = keys.number("block_ff_dim", "intermediate_size"), keys.number("block_multiple_of")
    factor = keys.get("block_ffn_dim_multiplier")
    if factor is not None and (type(factor) not in (int, float) or not 0 < factor <= 1000):
        rule = "must be a number above 0 and at most 1000."
        raise keys.wrong("block_ffn_dim_multiplier", f"found {quoted(factor)}; {rule}")
    if keys.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        width = width if factor is None else -(-int(factor * width) // multiple) * multiple
    tied = keys.flag("tie_embedding", "tie_word_embeddings")
    rest = {key: value for key, value in document.items() if key not in (*ADJUSTED, "tie_embedding")}
    return {**rest, "intermediate_size": width, "tie_word_embeddings": tied}


TEXT = {
    "lfm2": TextKind(
        {"qk_norm": True},
        state_space=short_convolution,
        first=_first,
        mixers=MIXERS,
        translate=_adjusted,
        without_effect=OF_BLOCKS,
    ),
    "lfm2_moe": TextKind(
        {"qk_norm": True},
        state_space=short_convolution,
        first=_first,
        mixers=MIXERS,
        without_effect="use_expert_bias",
    ),
}
