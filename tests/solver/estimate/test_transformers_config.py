"""Reading ``config.json``: the parameters are those that transformers counts for the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zbv_solver.commands.cli import main
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput
from zbv_solver.estimate.build import transformer
from zbv_solver.estimate.config_model import ModelConfig
from zbv_solver.estimate.transformers_config import READERS, from_transformers

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
NEMOTRON_H = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
COUNTED: list[tuple[dict[str, Any], int, int]] = [
    (LLAMA, 8_030_261_248, 0),
    ({**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}, 7_241_732_096, 0),
    ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok":
    2},
     46_702_792_704, 0),
    ({**LLAMA, "model_type": "qwen3", "num_hidden_layers": 36, "head_dim": 128, "intermediate_size": 12288,
      "vocab_size": 151936}, 8_190_735_360, 0),
    ({"model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
      "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064,
      "use_sliding_window": False, "sliding_window": 131072}, 32_763_876_352, 0),
    (QWEN3_MOE, 235_093_634_560, 0),
    ({"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
      "num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
      "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936}, 14_315_784_192, 0),
    (DEEPSEEK, 671_026_404_352, 0),
    ({**DEEPSEEK, "model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60,
      "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
      "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102400},
     235_741_434_880, 0),
    ({"model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
      "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
      "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1,
      "vocab_size": 151552, "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0},
     106_852_257_280, 0),
    ({"model_type": "nemotron_h", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
      "intermediate_size": 21504, "hybrid_override_pattern": "M-M-M-M*" * 4, "vocab_size": 131072},
     5_109_753_856, 0),
    ({"model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
      "layer_types": ["linear_attention", "moe"] * 2 + ["mamba", "full_attention", "moe"],
      "mamba_num_heads": 64, "vocab_size": 131072, "n_routed_experts": 128, "n_shared_experts": 1,
      "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6},
     4_736_683_584, 0),
    ({"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
      "intermediate_size": 24576, "vocab_size": 50432}, 20_554_567_680, 0),
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
    model = ModelConfig.model_validate({"sequence": 1024, **from_transformers(document)})
    assert transformer(model).parameters().total == counted - left_out


def _name(value: object) -> str:
    return str(value["model_type"]) if isinstance(value, dict) else ""


def test_properties_that_do_not_change_the_number_of_parameters() -> None:
    deepseek = from_transformers({**DEEPSEEK, "num_nextn_predict_layers": 1})
    assert (deepseek["prediction_layers"], deepseek["expert_nodes"], deepseek["dense_layers"]) == (1, 4, 3)
    assert "window" not in from_transformers({**LLAMA, "sliding_window": None})
    assert from_transformers({**LLAMA, "sliding_window": 4096})["window"] == 4096
    assert from_transformers({**LLAMA, "dtype": "float16", "torch_dtype": None})["dtype"] == "float16"
    gpt_oss = from_transformers(COUNTED[-1][0])
    assert (gpt_oss["window"], gpt_oss["full_attention_every"]) == (128, 2)


def test_llava_has_a_vision_encoder() -> None:
    """Liu et al. 2023, Improved Baselines with Visual Instruction Tuning: Vicuna 7B with CLIP ViT-L/14.

    transformers counts 7,063,427,072. It also counts CLIP's class token, its first norm, and its unused last
    norm; zbv counts a bias and positions of every patch.
    """
    vicuna = {**LLAMA, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32064}
    document = {"model_type": "llava", "text_config": vicuna, "vision_config": {"image_size": 336}}
    read = from_transformers(document)
    assert read["vision"]["patches"] == 576
    model = ModelConfig.model_validate({"sequence": 1024, **read})
    assert transformer(model).parameters().total == pytest.approx(7_063_427_072, rel=1e-4)


@pytest.mark.parametrize(
    ("document", "pointer", "says"),
    [
        ({"model_type": "t5"}, "/model_type", "found 't5'; zbv reads bloom, deepseek_v2"),
        ({"model_type": ["llama"]}, "/model_type", "found ['llama']"),
        ({"model_type": "llama", "hidden_size": 8}, "/num_hidden_layers", "absent"),
        ({**LLAMA, "model_type": "mixtral"}, "/num_local_experts", "absent"),
        ({**QWEN3_MOE, "mlp_only_layers": [5]}, "/mlp_only_layers", "found [5]"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "/moe_layer_freq", "reads only 1"),
        ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, "/use_sliding_window", "to false"),
        (
            {**NEMOTRON_H, "layer_types": ["mamba", 3]},
            "/layer_types",
            "found ['mamba', 3]; must have M, *, -",
        ),
        ({**NEMOTRON_H, "moe_latent_size": 8}, "/moe_latent_size", "no formula for latent experts"),
        ({**NEMOTRON_H, "layer_types": ["mamba"], "n_groups": 0}, "/n_groups", "whole number above 0"),
        ({"model_type": "llava"}, "/text_config", "absent"),
        ({"model_type": "bloom", "n_layer": 1, "n_head": 1, "vocab_size": 8}, "/hidden_size", "absent"),
    ],
)
def test_what_cannot_be_read_is_named(document: dict[str, Any], pointer: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_transformers(document)
    (issue,) = raised.value.issues
    assert issue.pointer == pointer
    assert says in issue.detail


@pytest.mark.parametrize("name", READERS)
def test_rubbish_is_no_traceback(name: str) -> None:
    """Sizes of a wrong type reach the configuration, which names them."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd", "n_layer", "n_head")
    rubbish: dict[str, Any] = {"model_type": name, "vocab_size": "x"} | {key: [1] for key in keys}
    rubbish |= {"num_experts": "y", "n_routed_experts": {}, "num_local_experts": -1}
    rubbish |= {"num_experts_per_tok": 0.5, "moe_intermediate_size": "w", "n_shared_experts": "v"}
    rubbish |= {"text_config": {**LLAMA, "vocab_size": None}, "vision_config": {"patch_size": "z"}}
    with pytest.raises(InvalidInput):
        read(rubbish)


def read(document: dict[str, Any]) -> ModelConfig:
    return validated(ModelConfig, {"sequence": 8, **from_transformers(document)})


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
