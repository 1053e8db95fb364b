"""Reading ``config.json``: the parameters are those that transformers counts for the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import expert_degree, layer_kinds, model_flops, parameters_of
from zbv_models.estimate.transformers_config import from_transformers
from zbv_models.estimate.transformers_text import TEXT_KINDS
from zbv_models.estimate.transformers_vision import WRAPPERS
from zbv_solver.commands.cli import main
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    **LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_group": 8, "topk_group": 4, "vocab_size": 129280,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 336, "patch_size": 14,
}  # fmt: skip
NEMOTRON_H = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
COUNTED: list[tuple[dict[str, Any], int, int]] = [
    (LLAMA, 8_030_261_248, 0),
    ({**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}, 7_241_732_096, 0),
    ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok":
    2},
     46_702_792_704, 0),
    (QWEN3_MOE, 235_093_634_560, 0),
    (DEEPSEEK, 671_026_404_352, 0),
    ({"model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
      "intermediate_size": 21504, "hybrid_override_pattern": "M-M-M-M*" * 4, "vocab_size": 131072},
     5_109_753_856, 0),
    ({"model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
      "layer_types": ["linear_attention", "moe"] * 2 + ["mamba", "full_attention", "moe"],
      "mamba_num_heads": 64, "vocab_size": 131072, "n_routed_experts": 128, "n_shared_experts": 1,
      "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6},
     4_736_683_584, 0),
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 124_439_808, 0),
    # BLOOM normalises its embedding, which zbv leaves out; gpt-oss has a number per head for attention sinks.
    ({"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880},
     176_247_271_424, 2 * 14336),
    ({"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
      "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
      "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True, "sliding_window": 128},
     116_829_156_672, 64 * 36),
]  # fmt: skip
"""Sizes of published models, the parameters that transformers 5 counts, and those that zbv leaves out."""


@pytest.mark.parametrize(("document", "counted", "left_out"), COUNTED, ids=lambda each: _name(each))
def test_a_config_has_the_parameters_that_transformers_counts(
    document: dict[str, Any], counted: int, left_out: int
) -> None:
    model = Transformer.model_validate({"sequence": 1024, **from_transformers(document)})
    assert parameters_of(model, with_predictions=False).total == counted - left_out


def _name(value: object) -> str:
    return str(value["model_type"]) if isinstance(value, dict) else ""


def test_properties_that_do_not_change_the_number_of_parameters() -> None:
    deepseek = from_transformers({**DEEPSEEK, "num_nextn_predict_layers": 1})
    assert (deepseek["prediction_layers"], deepseek["expert_nodes"], deepseek["dense_layers"]) == (1, 4, 3)
    assert "expert_nodes" not in from_transformers({**DEEPSEEK, "n_group": 1})
    assert "window" not in from_transformers({**LLAMA, "sliding_window": None})
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    assert from_transformers(mistral)["window"] == 4096
    assert from_transformers({**LLAMA, "dtype": "float16", "torch_dtype": None})["dtype"] == "float16"
    gpt_oss = from_transformers(COUNTED[-1][0])
    assert (gpt_oss["window"], gpt_oss["full_attention_every"]) == (128, 2)


def test_keys_go_by_the_names_that_published_files_have() -> None:
    """gemma-2-9b repeats its window, Nemotron-H its groups of queries, and llava-1.5 its vocabulary."""
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window_size": 1024, "sliding_window": None}
    assert from_transformers(gemma)["window"] == 1024
    listed = {**gemma, "layer_types": ["sliding_attention", "full_attention"] * 16}
    assert from_transformers(listed)["window"] == 1024
    hybrid = {**NEMOTRON_H, "layer_types": ["mamba", "attention"], "num_query_groups": 4}
    hybrid.pop("num_key_value_heads", None)
    assert from_transformers(hybrid)["kv_heads"] == 4
    every = {"layer_switch": 2, "order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True}
    cohere = {**LLAMA, "model_type": "cohere2", "sliding_window": 4096, **every}
    assert from_transformers(cohere)["full_attention_every"] == 2
    vicuna = {**LLAMA, "vocab_size": 32064}
    llava = {"model_type": "llava", "text_config": vicuna, "vision_config": CLIP, "vocab_size": 32064}
    assert from_transformers(llava)["vocabulary"] == 32064


@pytest.mark.parametrize(
    "dense",
    [
        {"first_k_dense_replace": 61},
        {"mlp_layer_types": ["dense"] * 61, "first_k_dense_replace": None},
    ],
)
def test_a_model_whose_blocks_are_all_dense_has_no_experts(dense: dict[str, Any]) -> None:
    read = from_transformers({**DEEPSEEK, "num_hidden_layers": 61, "num_nextn_predict_layers": 0, **dense})
    model = Transformer.model_validate({"sequence": 1024, **read})
    assert expert_degree(model) == 1
    assert parameters_of(model).experts == 0


def test_the_documentation_names_every_type() -> None:
    text = (ROOT / "docs/estimates.md").read_text(encoding="utf-8")
    for names in (TEXT_KINDS, WRAPPERS):
        assert f"| {', '.join(sorted(names))} |" in text


def test_llava_has_a_vision_encoder() -> None:
    """Liu et al. 2023, Improved Baselines with Visual Instruction Tuning: Vicuna 7B with CLIP ViT-L/14.

    transformers counts 7,063,427,072. It also counts CLIP's class token, its first norm, and its unused last
    norm; zbv counts a bias and positions of every patch.
    """
    vicuna = {**LLAMA, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32064}
    document = {"model_type": "llava", "text_config": vicuna, "vision_config": CLIP}
    read = from_transformers(document)
    assert read["vision"]["patches"] == 576
    model = Transformer.model_validate({"sequence": 1024, **read})
    assert parameters_of(model).total == pytest.approx(7_063_427_072, rel=1e-4)


TWO = {"num_hidden_layers": 2}
DEEP2, QWEN_NEXT = {**DEEPSEEK, **TWO}, {"model_type": "qwen3_next", **TWO}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "t5"}, "/model_type", "found 't5'; zbv reads arcee, bloom"),
    ({"model_type": ["llama"]}, "/model_type", "found ['llama']"),
    ({"model_type": "llava"}, "/text_config", "must be an object"),
    # Values of a wrong kind; numbers that contradict a list.
    ({**LLAMA, "hidden_size": "x"}, "/hidden_size", "must be a whole number above 0"),
    ({**DEEPSEEK, "moe_layer_freq": "x"}, "/moe_layer_freq", "must be a whole number from 1"),
    ({**DEEPSEEK, "n_group": "8"}, "/n_group", "must be a whole number from 0"),
    ({**QWEN3_MOE, "mlp_only_layers": 5}, "/mlp_only_layers", "must be a list"),
    ({**QWEN3_MOE, "mlp_only_layers": [94]}, "/mlp_only_layers", "numbers of layers, which are below 94"),
    ({**LLAMA, "layer_types": ["full_attention"] * 3}, "/layer_types", "one per layer (32)"),
    ({**LLAMA, "layer_types": ["full_attention", "lightning"] * 16}, "/layer_types",
     "found 'lightning'; zbv has formulas for attention, full_attention"),
    ({**NEMOTRON_H, "layer_types": ["mamba", 3]}, "/layer_types", "found 3; zbv has formulas for -, mlp, E"),
    ({**NEMOTRON_H, "layer_types": ["mamba"], "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["x"]},
     "/mtp_layers_block_type", "found 'x'"),
    ({**DEEP2, "mlp_layer_types": ["dense", "moe"]}, "/mlp_layer_types",
     "found 'moe'; zbv has formulas for sparse, dense"),
    ({**DEEP2, "index_topk": 8, "indexer_types": ["full", "part"]}, "/indexer_types",
     "found 'part'; zbv has formulas for full, F, shared, S"),
    ({**DEEPSEEK, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 59}, "/first_k_dense_replace",
     "found 3, but mlp_layer_types says otherwise"),
    ({**DEEP2, "first_k_dense_replace": 1, "moe_layer_freq": [1, 1], "mlp_layer_types": ["dense", "sparse"]},
     "/moe_layer_freq", "found [1, 1], but mlp_layer_types says otherwise"),
    ({**QWEN_NEXT, "full_attention_interval": 4, "layer_types": ["linear_attention", "full_attention"]},
     "/full_attention_interval", "found 4, but layer_types says otherwise"),
    ({"model_type": "exaone4", **TWO, "sliding_window_pattern": "LLLG",
      "layer_types": ["sliding_attention", "full_attention"]},
     "/sliding_window_pattern", "found 'LLLG', but layer_types says otherwise"),
    ({"model_type": "llama4_text", "num_hidden_layers": 4, "moe_layers": [0, 2],
      "interleave_moe_layer_step": 2},
     "/interleave_moe_layer_step", "found 2, but moe_layers says otherwise"),
    ({"model_type": "glm_moe_dsa", **TWO, "index_topk_freq": 2, "indexer_types": ["full", "full"],
      "index_skip_topk_offset": 1}, "/index_topk_freq", "found 2, but indexer_types says otherwise"),
    ({**DEEPSEEK, "qk_head_dim": 256}, "/qk_head_dim", "must be qk_nope_head_dim + qk_rope_head_dim (192)"),
    ({**LLAMA, "num_experts": 8, "n_routed_experts": 16}, "/num_experts",
     "found 8, but n_routed_experts says 16"),
    ({"model_type": "llava", "text_config": {**LLAMA, "vocab_size": 32000}, "vocab_size": 32064},
     "/vocab_size", "found 32064, but the language model has 32000"),
    # What zbv has no formula for, or does not know.
    ({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}, "/mtp_num_hidden_layers",
     "layers of such a module share its projection"),
    ({**LLAMA, "model_type": "minimax_m2", "attn_type_list": [0, 1] * 16}, "/attn_type_list",
     "formulas for 1 only"),
    ({**LLAMA, "model_type": "minimax_m2", "mtp_transformer_layers": 2}, "/mtp_transformer_layers",
     "modules of one layer only"),
    ({"model_type": "llava", "text_config": LLAMA, "vision_config": {"model_type": "dinov2"}},
     "/vision_config/model_type", "remove vision_config to plan the language model alone"),
    ({**LLAMA, "sliding_window": 4096}, "/sliding_window", "does not know what this key changes"),
    ({**LLAMA, "add_cross_attention": True}, "/add_cross_attention", "formulas for false or null only"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "pointer", "says"), WRONG)
def test_what_cannot_be_read_is_named(document: dict[str, Any], pointer: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_transformers(document)
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert says in issue.detail


REFUSED = ("deepseek_v4", "gemma4", "kimi_linear", "mimo_v2_flash", "minimax_m3", "nemotron-nas", "step3p7")


@pytest.mark.parametrize("name", REFUSED)
def test_types_without_formulas_are_refused_by_name_with_the_remedy(name: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_transformers({**LLAMA, "model_type": name})
    (issue,) = raised.value.issues
    assert issue.pointer == "/model_type"
    assert f"found '{name}'" in issue.detail
    assert "Write its sizes as model.json" in issue.detail


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_the_language_model_of_an_unknown_wrapper_can_be_planned_alone(key: str) -> None:
    document = {"model_type": "ovis2", key: LLAMA, "vision_config": {"model_type": "aimv2"}}
    with pytest.raises(InvalidInput) as raised:
        from_transformers(document)
    (issue,) = raised.value.issues
    assert f"save the section {key} as a file" in issue.detail
    assert parameters_of(read(LLAMA)).total == 8_030_261_248


@pytest.mark.parametrize(
    "text", [{"model_type": "gemma4_text"}, {**LLAMA, "wormholes_per_block": 3}, {"hidden_size": 1}, [], None]
)
def test_nobody_is_sent_to_a_section_that_zbv_does_not_read(text: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_transformers({"model_type": "gemma4", "text_config": text})
    (issue,) = raised.value.issues
    assert "text_config" not in issue.detail


def read(document: dict[str, Any]) -> Transformer:
    return validated(Transformer, {"sequence": 8, **from_transformers(document)})


Capture = pytest.CaptureFixture[str]
LAYOUT = ["--preset", "h100", "--pp-degree", "4", "--microbatches", "8"]


def test_the_command_recognises_a_config(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    given = ["estimate", "--config", str(path), *LAYOUT]
    assert main([*given, "--sequence", "2048"]) == 0
    problem = json.loads(capsys.readouterr().out)
    assert problem["layers"][1]["repeat"] == 32
    assert main(given) == 2
    assert "--sequence: a config.json does not say how long sequences are" in capsys.readouterr().err
    path.write_text(json.dumps({"model_type": "t5"}))
    assert main(given) == 2
    assert f"{path}: /model_type: found 't5'" in capsys.readouterr().err


GLM_5 = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
    "num_key_value_heads": 64, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "vocab_size": 154880,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN3_5 = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 1024, "num_experts": 512,
    "num_experts_per_tok": 10, "shared_expert_intermediate_size": 1024, "linear_num_key_heads": 16,
    "linear_num_value_heads": 64, "attn_output_gate": True, "mtp_num_hidden_layers": 1, "vocab_size": 248320,
}  # fmt: skip
NEMOTRON_3_SUPER = {
    "model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*" + 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22, "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024, "vocab_size": 131072,
}  # fmt: skip
GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 92,
    "hidden_size": 5120, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151552, "max_position_embeddings": 202752,
    "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "use_qk_norm": True, "attention_bias": True,
    "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
PUBLISHED: list[tuple[str, dict[str, Any], float, float]] = [
    ("GLM-4.5: 355 B, 32 B active", GLM_4_5, 355e9, 32e9),
    ("GLM-5: 744 B, 40 B active", GLM_5, 744e9, 40e9),
    ("DeepSeek-V3.2: 671 B, 37 B active", {**DEEPSEEK, "model_type": "deepseek_v32"}, 671e9, 37e9),
    ("Qwen3.5-397B-A17B", QWEN3_5, 397e9, 17e9),
    ("MiniMax-M2: 230 B, 10 B active", {"model_type": "minimax_m2"}, 230e9, 10e9),
    ("Nemotron-3-Super-120B-A12B", NEMOTRON_3_SUPER, 120e9, 12e9),
    ("Llama 4 Maverick: 400 B, 17 B active",
     {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2}, 400e9, 17e9),
    ("Qwen3-Next-80B-A3B", {"model_type": "qwen3_next"}, 80e9, 3e9),
    ("Gemma 3 27B", {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
     "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
     "head_dim": 128}, 27e9, 27e9),
    ("Gemma 2 9B", {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
     "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8}, 9.24e9, 9.24e9),
]  # fmt: skip
"""Names and model cards give rounded numbers; active ones count the head, and sometimes not the embedding."""


@pytest.mark.parametrize(
    ("document", "total", "active"), [each[1:] for each in PUBLISHED], ids=[each[0] for each in PUBLISHED]
)
def test_models_of_2025_have_the_published_parameters(
    document: dict[str, Any], total: float, active: float
) -> None:
    model = Transformer.model_validate({"sequence": 4096, **from_transformers(document)})
    count = parameters_of(model, with_predictions=False)
    assert count.total == pytest.approx(total, rel=0.015)
    assert count.active == pytest.approx(active, abs=max(0.13 * active, 1.3e9))


LIGHTNING = {
    "model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"],
    "mtp_layers_block_type": ["attention", "moe"], "num_nextn_predict_layers": 1, "intermediate_size": 1856,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "mamba_num_heads": 64, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "vocab_size": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Nemotron-3.5-Lightning with fewer layers."""


def test_a_hybrid_model_has_its_prediction_module() -> None:
    """Attention and 128 experts behind the projection, and second logits."""
    model = read(LIGHTNING)
    module = parameters_of(model).total - parameters_of(model, with_predictions=False).total
    experts, attention = 128 * 2 * 2688 * 1856 + 2 * 2688 * 3712, 2688 * (32 + 4 + 32) * 128
    assert module == pytest.approx(experts + attention + 2 * 2688**2, rel=1e-3)
    assert module == pytest.approx(1.33e9, rel=0.01)
    layers = {kind.name: kind for kind in layer_kinds(model)}
    assert [name for name, _ in layers["prediction"].halves] == ["joining", "attention", "experts"]
    without = read({**LIGHTNING, "num_nextn_predict_layers": 0})
    logits = 3 * 2 * 8 * 2688 * 131072
    assert model_flops(model) - model_flops(without) > logits


def test_the_layers_of_a_file_become_kinds_of_blocks() -> None:
    kinds = {
        "gemma3_text": "W-W-W-W-W-*-W-W-W-W-W-*-",
        "gemma2": "W-*-" * 6,
        "qwen3_5_text": "M-M-M-*-" * 3,
        "qwen3_next": "MEMEME*E" * 3,
        "llama4_text": "WEWEWE*E" * 3,
        "deepseek_v32": "I-I-I-" + "IE" * 9,
        "mixtral": "*E" * 12,
    }
    for name, expected in kinds.items():
        model = read({"model_type": name, "num_hidden_layers": 12})
        assert "".join(model.kinds) == expected, name
    shared = {**GLM_5, "num_hidden_layers": 12, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert "".join(read(shared).kinds) == "I-I-I-WEWEWEIEWEWEWEIEWE"
    switched = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True,
                "sliding_window": 64, "max_window_layers": 2}  # fmt: skip
    assert "".join(read(switched).kinds) == "*-*-W-W-"


def test_numbers_that_agree_with_a_list_are_read() -> None:
    period = {"num_hidden_layers": 8, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2}
    for every in ("LLLG", 4, None):
        exaone = {"model_type": "exaone4", **period, "sliding_window_pattern": every, "sliding_window": 64}
        assert "".join(read(exaone).kinds) == "W-W-W-*-" * 2
    listed = {**DEEPSEEK, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58}
    assert read(listed).dense_layers == 3


def test_dropout_of_a_file_counts_outside_attention() -> None:
    assert from_transformers({"model_type": "gpt2"})["dropout"] is True
    assert from_transformers({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0})["dropout"] is False
    assert from_transformers({**LLAMA, "attention_dropout": 0.1})["dropout"] is False
