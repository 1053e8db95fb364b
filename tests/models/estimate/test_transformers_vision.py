"""Vision encoders of a ``config.json`` against published sizes, and what a file must say of them."""

from __future__ import annotations

from typing import Any

import pytest
from zbv_models.estimate.build import transformer
from zbv_models.estimate.config_model import ModelConfig
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformer import Transformer
from zbv_models.estimate.transformers_config import from_transformers
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput


def read(document: dict[str, Any]) -> ModelConfig:
    return validated(ModelConfig, {"sequence": 8, **from_transformers(document)})


def vision_parameters(model: Transformer) -> int:
    """Those of patches and blocks."""
    return sum(
        half.part(model.shapes(kind, Degrees())).parameters.total * kind.count
        for kind in model.layers()
        if kind.name.partition(".")[0] in ("patches", "vision")
        for _, half in kind.halves
    )


PIXTRAL = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "max_position_embeddings": 1024000,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"head_dim": 64, "hidden_act": "silu", "image_size": 1024, "model_type": "pixtral",
                      "patch_size": 16, "rope_theta": 10000.0},
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
}  # fmt: skip


def test_pixtral_has_gates_and_rotated_positions() -> None:
    """Agrawal et al. 2024, Pixtral 12B, table 1: 24 blocks of width 1024, ffn 4096, 16 heads, 400 M."""
    vision = from_transformers(PIXTRAL)["vision"]
    assert (vision["gated"], vision["positions"], vision["norm"]) == (True, "rotary", "rmsnorm")
    assert (vision["bias"], vision["patches"]) == (False, 64**2)
    model = transformer(read(PIXTRAL))
    encoder = vision_parameters(model)
    assert encoder == 24 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 3 * 16**2 * 1024
    assert encoder == pytest.approx(400e6, rel=0.02)


KIMI_VL = {
    "model_type": "kimi_vl", "vocab_size": 163840, "ignore_index": -100,
    "text_config": {
        "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "tie_word_embeddings": False,
    },
    "vision_config": {"model_type": "moonvit", "patch_size": 14, "num_attention_heads": 16,
                      "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
                      "init_pos_emb_height": 64, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2]},
}  # fmt: skip


def test_kimi_vl_has_16_billion_parameters_and_an_encoder_of_400_million() -> None:
    """Kimi Team 2025, Kimi-VL, §2.1 and §2.3: 16 B with 2.8 B active, and MoonViT of 400 M."""
    model = transformer(read(KIMI_VL))
    count = model.parameters(with_predictions=False)
    assert count.total == pytest.approx(16.4e9, rel=0.01)
    assert vision_parameters(model) == pytest.approx(415e6, rel=0.01)
    active = count.active - vision_parameters(model)
    assert active == pytest.approx(2.8e9, rel=0.1)


QWEN2_5_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 32768,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
    "vision_start_token_id": 151652, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2, "image_size": 448,
    },
}  # fmt: skip


def test_most_blocks_of_qwen2_5_vl_attend_within_pieces_of_an_image() -> None:
    """Bai et al. 2025, Qwen2.5-VL, table 1: 4 of 32 blocks see all patches, the others 8 x 8; 8.29 B."""
    model = transformer(read(QWEN2_5_VL))
    assert model.parameters().total == pytest.approx(8.29e9, rel=0.001)
    scores = {
        int(kind.name.removeprefix("vision.")): half.part(model.shapes(kind, Degrees())).core.forward
        for kind in model.layers()
        if kind.name.startswith("vision.")
        for name, half in kind.halves
        if name == "attention"
    }
    whole, pieces = 4.0 * 32**4 * 1280, 4.0 * 32**2 * 64 * 1280
    assert scores == {place: whole if place % 8 == 7 else pieces for place in range(32)}


def test_an_encoder_without_a_size_of_images_asks_for_it() -> None:
    seen = {key: value for key, value in QWEN2_5_VL["vision_config"].items() if key != "image_size"}
    with pytest.raises(InvalidInput) as raised:
        from_transformers({**QWEN2_5_VL, "vision_config": seen})
    (issue,) = raised.value.issues
    assert issue.pointer == "/vision_config/image_size"
    assert "Add how many pixels a side of an image has, or remove vision_config" in issue.detail
    assert "vision" not in from_transformers({**QWEN2_5_VL, "vision_config": None})


def test_an_encoder_must_give_tokens_of_the_models_width() -> None:
    seen = {**QWEN2_5_VL["vision_config"], "out_hidden_size": 2048}
    with pytest.raises(InvalidInput) as raised:
        from_transformers({**QWEN2_5_VL, "vision_config": seen})
    (issue,) = raised.value.issues
    assert issue.pointer == "/vision_config/out_hidden_size"
    assert "found 2048; must be the width of the language model (3584)" in issue.detail
