"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention (§2.3) between several residual streams (§2.2).

``deepseek_ref`` is the type of files in a reference implementation's format. The first blocks choose experts
by a table of tokens, which is no parameter.
"""

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Keys
from zbv_models.estimate.transformers_kinds import Blocks, TextKind

RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
LETTERS = {"sliding_attention": "W", "compressed_sparse_attention": "I", "heavily_compressed_attention": "*"}


def _vary(keys: Keys, blocks: Blocks) -> Blocks:
    """Three kinds of attention: the window alone, chosen compressed tokens, and all of a greater ratio."""
    names = {"query_rank": "q_lora_rank", "output_groups": "o_groups", "output_rank": "o_lora_rank"}
    sizes = {key: keys.number(name) for key, name in names.items()}
    rates = keys.inside("compress_rates")
    chosen, heavy = (rates.size(name) or ratio for name, ratio in RATIOS.items())
    more: dict[str, Section] = {
        "W": {},
        "I": {"ratio": chosen, "chosen": keys.number("index_topk")},
        "*": {"ratio": heavy},
    }
    for letter, added in more.items():
        blocks = blocks.varied(0, blocks.places(0, letter), compressed={**sizes, **added})
    return blocks


def _first(_: Keys, count: int) -> str:
    return "".join("I" if place >= 2 and place % 2 else "*" for place in range(count))


def _more(keys: Keys) -> Section:
    return {
        "window": keys.number("sliding_window"),
        "index_heads": keys.number("index_n_heads"),
        "index_dim": keys.number("index_head_dim"),
        "residual_streams": keys.number("hc_mult"),
    }


V4 = TextKind(
    {"bias": False, "qkv_bias": False},
    window="all",
    mixers={**LETTERS, 0: "W", 4: "I", 128: "*"},
    defaults="deepseek_v4",
    without_effect="compress_rope_theta hc_sinkhorn_iters num_hash_layers qk_rope_head_dim",
    first=_first,
    vary=_vary,
    more=_more,
)
TEXT = {"deepseek_ref": V4, "deepseek_v4": V4}
