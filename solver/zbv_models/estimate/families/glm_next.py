"""GLM-5.3-Flash (Zhipu AI 2026): delta attention, sparse latent attention without rotation, residual streams.

An indexer compares groups of tokens. The encoder is left out.
"""

from dataclasses import replace

from zbv_models.estimate.recurrent import KimiDelta
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind, Wrapper
from zbv_models.estimate.transformers_text import indexed


def _translate(document: Section) -> Section:
    """``head_dim`` repeats the width of rotated keys; a file may have the sizes of delta attention inside."""
    others = {key: value for key, value in document.items() if key != "head_dim"}
    inner = document.get("linear_attn_config")
    names = {"head_dim": "head_dim", "num_heads": "num_heads", "short_conv_kernel_size": "conv_kernel_dim"}
    if isinstance(inner, dict):
        others |= {f"linear_{name}": inner[key] for key, name in names.items() if key in inner}
    return others


def _delta(keys: Keys) -> Section:
    sizes = (keys.number(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    return KimiDelta(keys.number("hidden_size"), *sizes).costs()


def _vary(keys: Keys, blocks: Blocks) -> Blocks:
    """Blocks without delta attention use the choice of an earlier one where their indexer is shared."""
    chosen = indexed(keys, len(blocks.letters))
    letters = (
        own + block[1:] if block[0] == "I" else block
        for own, block in zip(chosen, blocks.letters, strict=True)
    )
    return replace(blocks, letters=tuple(letters))


TEXT = {
    "glm5_next_text": TextKind(
        {"bias": False, "qkv_bias": False},
        state_space=_delta,
        mixers={"linear_attention": "M", "indexed_attention": "I", "full_attention": "I"},
        first=lambda _, count: "".join("I" if place % 4 == 3 else "M" for place in range(count)),
        computed={"first_k_dense_replace": 3},
        without_effect="hc_sinkhorn_iters index_kpool_always_select_tail linear_attn_config "
        "linear_lower_bound",
        translate=_translate,
        vary=_vary,
        more=lambda keys: {
            "residual_streams": keys.number("hc_mult"),
            "index_pool": keys.number("index_kpool"),
        },
    ),
}
WRAPPERS = {"glm5_next": Wrapper("glm5_next_text", flat=True)}
