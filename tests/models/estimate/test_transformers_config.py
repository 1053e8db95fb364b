"""Reading ``config.json``: published sizes, the kinds of layers, other values, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.paths import ROOT
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import expert_degree, parameters_of
from zbv_models.estimate.transformers_config import from_transformers
from zbv_models.estimate.transformers_text import TEXT_KINDS
from zbv_models.estimate.transformers_vision import WRAPPERS
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput

# Sizes that a file leaves out are those of its type.
LLAMA: dict[str, Any] = {"model_type": "llama"}
HYBRID: dict[str, Any] = {"model_type": "nemotron_h"}
SUPER = {
    **HYBRID, "num_key_value_heads": 2, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
}  # fmt: skip
KIMI_VL = {
    "model_type": "kimi_vl", "vocab_size": 163840, "vision_config": {"model_type": "moonvit"},
    "text_config": {
        "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None,
    },
}  # fmt: skip
QWEN2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584,
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "image_size": 448},
}  # fmt: skip


def read(document: dict[str, Any]) -> Transformer:
    return validated(Transformer, {"sequence": 1024, **from_transformers(document)})


@pytest.mark.parametrize(("document", "total", "active"), [(SUPER, 120e9, 12e9), (KIMI_VL, 16.4e9, None)])
def test_a_file_has_the_published_parameters(
    document: dict[str, Any], total: float, active: float | None
) -> None:
    """Other types are compared with transformers, which counts neither these nor active parameters."""
    count = parameters_of(read(document), with_predictions=False)
    assert count.total == pytest.approx(total, rel=0.015)
    assert active is None or count.active == pytest.approx(active, rel=0.13)


def test_the_encoder_of_kimi_vl_has_the_published_parameters() -> None:
    """Kimi Team 2025, Kimi-VL, §2.1: MoonViT has 400 M; counted, 415 M. Merged patches are projected."""
    whole, text = (parameters_of(read(file)).total for file in (KIMI_VL, {**KIMI_VL, "vision_config": None}))
    assert whole - text == pytest.approx(415e6 + 4608**2 + 4608 * 2048, rel=0.005)


TWELVE = {"num_hidden_layers": 12}
DSA = {"model_type": "glm_moe_dsa", **TWELVE, "index_topk_freq": 4, "index_skip_topk_offset": 3}
EXAONE = {"model_type": "exaone4", "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
          **TWELVE, "sliding_window": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("document", "kinds"),
    [
        ({"model_type": "gemma3_text", **TWELVE}, "W-W-W-W-W-*-" * 2),
        ({"model_type": "gemma2", **TWELVE}, "W-*-" * 6),
        ({"model_type": "qwen3_5_text", **TWELVE}, "M-M-M-*-" * 3),
        ({"model_type": "qwen3_next", **TWELVE}, "MEMEME*E" * 3),
        ({"model_type": "llama4_text", **TWELVE}, "WEWEWE*E" * 3),
        ({"model_type": "deepseek_v32", **TWELVE}, "I-I-I-" + "IE" * 9),
        ({"model_type": "mixtral", **TWELVE}, "*E" * 12),
        ({"model_type": "deepseek_v3", **TWELVE, "first_k_dense_replace": 12}, "*-" * 12),
        ({"model_type": "deepseek_v3", **TWELVE, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 9},
         "*-" * 3 + "*E" * 9),
        (DSA, "I-I-I-WEWEWEIEWEWEWEIEWE"),
        ({"model_type": "qwen2", **TWELVE, "use_sliding_window": True, "sliding_window": 64,
          "max_window_layers": 2}, "*-*-" + "W-" * 10),
        ({"model_type": "cohere2", **TWELVE, "sliding_window": 4096, "layer_switch": 2}, "W-*-" * 6),
        *(({**EXAONE, "sliding_window_pattern": every}, "W-W-W-*-" * 3) for every in ("LLLG", 4, None)),
        ({**HYBRID, "layers_block_type": ["mamba", "moe", "attention"]}, "ME*"),
        ({**HYBRID, "layer_types": ["linear_attention", "moe", "mamba", "full_attention"]}, "MEM*"),
        ({**HYBRID, "hybrid_override_pattern": "M-M*" * 2}, "M-M*" * 2),
        ({**HYBRID, "layer_types": ["mamba", "attention"], "sliding_window": 64}, "MW"),
    ],
)  # fmt: skip
def test_the_layers_of_a_file_become_kinds_of_blocks(document: dict[str, Any], kinds: str) -> None:
    model = read(document)
    assert "".join(model.kinds) == kinds
    assert (expert_degree(model) > 1) == ("E" in kinds)


GEMMA = {"model_type": "gemma2", **TWELVE, "sliding_window": None, "sliding_window_size": 1024}
MTP = {**HYBRID, "layer_types": ["mamba", "moe"], "mtp_layers_block_type": ["attention", "moe"],
       "num_nextn_predict_layers": 1}  # fmt: skip
SEEN = QWEN2_5_VL["vision_config"]


@pytest.mark.parametrize(
    ("document", "section"),
    [
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
         {"prediction_layers": 1, "expert_nodes": 4, "dense_layers": 3, "shared_expert_ffn": 2048}),
        *(({"model_type": "deepseek_v3", "n_group": groups}, {"expert_nodes": nodes})
          for groups, nodes in ((1, None), (2, 4))),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, {"window": 4096}),
        ({**LLAMA, "sliding_window": None, "dtype": "float16"}, {"window": None, "dtype": "float16"}),
        ({"model_type": "gpt_oss"}, {"window": 128, "full_attention_every": 2}),
        # Names that published files have: gemma-2-9b repeats its window, Nemotron-H its groups of queries.
        (GEMMA, {"window": 1024}),
        ({**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 6}, {"window": 1024}),
        ({"model_type": "nemotron_h", "layer_types": ["mamba", "attention"], "num_query_groups": 4},
         {"kv_heads": 4}),
        # Dropout counts outside attention.
        ({"model_type": "gpt2"}, {"dropout": True}),
        ({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0}, {"dropout": False}),
        ({**LLAMA, "attention_dropout": 0.1}, {"dropout": False}),
        (MTP, {"prediction_layers": 1, "prediction_pattern": "(*E)", "pattern": "ME"}),
        (QWEN2_5_VL, {"vision": {
            "hidden": 1280, "layers": 32, "heads": 16, "ffn": 3420, "patches": 32**2, "merged": 4,
            "patch_values": 3 * 14**2 * 2, "pooled": False, "projector": [4 * 1280], "projectors": 1,
            "window": 64, "full_attention": [7, 15, 23, 31], "norm": "rmsnorm", "gated": True,
            "positions": "rotary"}}),
        ({**QWEN2_5_VL, "vision_config": None}, {"vision": None}),
    ],
)  # fmt: skip
def test_a_file_gives_the_values_of_the_section_model(
    document: dict[str, Any], section: dict[str, Any]
) -> None:
    found = from_transformers(document)
    assert {key: found.get(key) for key in section} == section


TWO = {"num_hidden_layers": 2}
DEEP2, QWEN_NEXT = {"model_type": "deepseek_v3", **TWO}, {"model_type": "qwen3_next", **TWO}
REFUSED = ("deepseek_v4", "gemma4", "kimi_linear", "mimo_v2_flash", "minimax_m3", "nemotron-nas", "step3p7")
SENT = "save the section {} as a file"
UNREADABLE: list[Any] = [
    {"model_type": "gemma4_text"}, {**LLAMA, "wormholes": 3}, {"hidden_size": 1}, [], None
]  # fmt: skip
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "t5"}, "/model_type", "found 't5'; zbv reads arcee, bloom"),
    ({"model_type": ["llama"]}, "/model_type", "found ['llama']"),
    *(({**LLAMA, "model_type": name}, "/model_type", "Write its sizes as model.json") for name in REFUSED),
    # The language model of an unknown wrapper can be planned alone, if zbv reads it.
    *(({"model_type": "ovis2", key: LLAMA}, "/model_type", SENT.format(key))
      for key in ("text_config", "llm_config")),
    *(({"model_type": "gemma4", "text_config": text}, "/model_type", ". Write its sizes as model.json")
      for text in UNREADABLE),
    ({"model_type": "llava"}, "/text_config", "must be an object"),
    # Values of a wrong kind (any may be, see the comparison with transformers), and lists of other lengths.
    ({**LLAMA, "hidden_size": "x"}, "/hidden_size", "must be a whole number above 0"),
    ({**DEEP2, "n_group": "8"}, "/n_group", "must be a whole number from 0"),
    ({**QWEN_NEXT, "mlp_only_layers": 5}, "/mlp_only_layers", "must be a list"),
    ({**QWEN_NEXT, "mlp_only_layers": [2]}, "/mlp_only_layers", "numbers of layers, which are below 2"),
    ({**LLAMA, "layer_types": ["full_attention"] * 3}, "/layer_types", "one per layer (32)"),
    ({**HYBRID, "layer_types": ["mamba"], **TWO}, "/num_hidden_layers", "found 2; there are 1 layers"),
    # Values of lists that zbv does not know.
    *(({**file, key: [known, other]}, f"/{key}", f"found {other!r}; zbv has formulas for {formulas}")
      for file, key, known, other, formulas in (
          ({**LLAMA, **TWO}, "layer_types", "full_attention", "lightning", "attention, full_attention"),
          (HYBRID, "layer_types", "mamba", 3, "-, mlp, E"),
          (MTP, "mtp_layers_block_type", "moe", "x", ""),
          (DEEP2, "mlp_layer_types", "dense", "moe", "sparse, dense"),
          ({**DEEP2, "index_topk": 8}, "indexer_types", "full", "part", "full, F, shared, S"))),
    # Numbers that contradict a list.
    *(({**file, key: value, "num_hidden_layers": 2, listed: values}, f"/{key}",
       f"found {value!r}, but {listed} says otherwise")
      for file, key, value, listed, values in (
          (DEEP2, "first_k_dense_replace", 0, "mlp_layer_types", ["dense", "sparse"]),
          ({**DEEP2, "first_k_dense_replace": 1}, "moe_layer_freq", [1, 1], "mlp_layer_types",
           ["dense", "sparse"]),
          (QWEN_NEXT, "full_attention_interval", 4, "layer_types", ["linear_attention", "full_attention"]),
          ({"model_type": "exaone4"}, "sliding_window_pattern", "LLLG", "layer_types",
           ["sliding_attention", "full_attention"]),
          ({"model_type": "llama4_text"}, "interleave_moe_layer_step", 2, "moe_layers", [0]),
          ({"model_type": "glm_moe_dsa", "index_skip_topk_offset": 1}, "index_topk_freq", 2, "indexer_types",
           ["full", "full"]))),
    ({**DEEP2, "qk_head_dim": 256}, "/qk_head_dim", "must be qk_nope_head_dim + qk_rope_head_dim (192)"),
    ({**LLAMA, "num_experts": 8, "n_routed_experts": 16}, "/num_experts", "but n_routed_experts says 16"),
    ({"model_type": "llava", "text_config": LLAMA, "vocab_size": 1}, "/vocab_size",
     "found 1, but the language model has 32000"),
    # What zbv has no formula for, or does not know.
    ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}, "/mtp_num_hidden_layers", "its projection"),
    ({"model_type": "minimax_m2", **TWO, "attn_type_list": [0, 1]}, "/attn_type_list", "formulas for 1 only"),
    ({"model_type": "minimax_m2", "mtp_transformer_layers": 2}, "/mtp_transformer_layers", "one layer only"),
    ({**KIMI_VL, "vision_config": {"model_type": "dinov2"}}, "/vision_config/model_type",
     "remove vision_config"),
    ({**LLAMA, "sliding_window": 4096}, "/sliding_window", "does not know what this key changes"),
    ({**LLAMA, "add_cross_attention": True}, "/add_cross_attention", "formulas for false or null only"),
    ({**QWEN2_5_VL, "vision_config": {**SEEN, "image_size": None}}, "/vision_config/image_size",
     "Add how many pixels a side of an image has, or remove vision_config"),
    ({**QWEN2_5_VL, "vision_config": {**SEEN, "out_hidden_size": 2048}}, "/vision_config/out_hidden_size",
     "found 2048; must be the width of the language model (3584)"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "pointer", "says"), WRONG)
def test_what_cannot_be_read_is_named(document: dict[str, Any], pointer: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_transformers(document)
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert says in issue.detail


def test_the_documentation_names_every_type() -> None:
    text = (ROOT / "docs/estimates.md").read_text(encoding="utf-8")
    for names in (TEXT_KINDS, WRAPPERS):
        assert f"| {', '.join(sorted(names))} |" in text
