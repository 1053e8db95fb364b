"""Parameters and operations of presets against published figures; each preset names its sources."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import but, estimate_config, llama, preset_config
from zbv_models.estimate.build import transformer
from zbv_models.estimate.config_model import ModelConfig
from zbv_models.estimate.presets import preset, preset_names
from zbv_models.estimate.problem_document import estimate_layers
from zbv_models.estimate.transformer import Transformer

MODELS = [name for name in preset_names() if preset(name).model]
SPARSE = [name for name in MODELS if "active" in preset(name).published]


def model(name: str, **changes: Any) -> Transformer:
    return transformer(but(preset_config(name).model, **changes))


@pytest.mark.parametrize("name", MODELS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    published = preset(name).published
    counted: dict[str, dict[str, Any]] = {
        "one vocabulary matrix": {"tied_embeddings": True},
        "without predictions": {"prediction_layers": 0},
    }
    found = model(name, **counted.get(published.get("parameters_counted", ""), {}))
    within = published.get("parameters_within", 0)
    count = found.parameters().total
    assert count == pytest.approx(published["parameters"], rel=0, abs=within)
    if "without_embeddings" in published:
        tables = 2 * found.vocabulary * found.stream.hidden
        within = published["without_embeddings_within"]
        assert count - tables == pytest.approx(published["without_embeddings"], rel=0, abs=within)


def test_sparse_models_are_among_the_presets() -> None:
    assert {"deepseek-v3", "mixtral-8x7b", "qwen3-235b-a22b"} <= set(SPARSE)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_have_the_published_number_of_active_parameters(name: str) -> None:
    published = preset(name).published
    count = model(name, prediction_layers=0).parameters().active
    assert count == pytest.approx(published["active"], rel=0, abs=published["active_within"])


def test_the_prediction_module_of_deepseek_v3_has_11_5_billion_parameters() -> None:
    """README_WEIGHTS.md of its checkpoint, without the tables that it shares; its projection included."""
    published = preset("deepseek-v3").published
    with_it, without = (model("deepseek-v3", prediction_layers=n).parameters().total for n in (1, 0))
    assert with_it - without == pytest.approx(published["predictions"], rel=0.01)


def gflop_per_token(found: Transformer) -> float:
    return found.model_flops() / found.sequence / 1e9


def test_training_deepseek_v3_takes_250_gflop_per_token() -> None:
    """DeepSeek-AI 2025, Insights into DeepSeek-V3, table 2, for 4096 tokens and a causal mask."""
    published = preset("deepseek-v3").published
    found = model("deepseek-v3", prediction_layers=0, sequence=published["gflop_per_token_at"])
    assert gflop_per_token(found) == pytest.approx(published["gflop_per_token"], rel=2e-3)


def test_training_llama_3_1_405b_takes_2448_gflop_per_token() -> None:
    """The same table, within 1 %."""
    assert gflop_per_token(model("llama-3.1-405b", sequence=4096)) == pytest.approx(2448, rel=0.011)


def deepseek_v2(**changes: Any) -> Transformer:
    sizes = {
        "hidden": 5120, "layers": 60, "heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "ffn": 12288, "experts": 160,
        "experts_per_token": 6, "expert_ffn": 1536, "shared_expert_ffn": 3072, "dense_layers": 1,
        "vocabulary": 102400, "sequence": 4096, "gated": True, "norm": "rmsnorm", "bias": False,
        "positions": "rotary",
    }  # fmt: skip
    return transformer(ModelConfig.model_validate({**sizes, **changes}))


def test_deepseek_v2_has_236_billion_parameters_and_155_gflop_per_token() -> None:
    """Its checkpoint; DeepSeek-AI 2024, DeepSeek-V2, §1: 21 B active; Insights into DeepSeek-V3, table 2."""
    count = deepseek_v2().parameters()
    assert count.total == 235_741_434_880
    assert count.active == pytest.approx(21e9, rel=0.02)
    assert gflop_per_token(deepseek_v2()) == pytest.approx(155, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "tokens", "operations"),
    [("gpt-3-175b", 300e9, 3.14e23), ("llama-3.1-405b", 15.6e12, 3.8e25)],
    ids=["Brown et al. 2020, table D.1", "Grattafiori et al. 2024, §1"],
)
def test_training_took_the_published_operations(name: str, tokens: float, operations: float) -> None:
    """Both count 6 per parameter and token, without scores: with a window of one token there are none."""
    found = gflop_per_token(model(name, window=1, attention="flash")) * 1e9
    assert found * tokens == pytest.approx(operations, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("qwen3-32b", 32.8)]
)
def test_dense_models_take_6_operations_per_parameter_and_token(name: str, billions: float) -> None:
    """Kaplan et al. 2020, §2.1, without the embedding's table and scores."""
    found = model(name, window=1)
    table = found.vocabulary * found.stream.hidden
    assert gflop_per_token(found) == pytest.approx(6 * (billions - table / 1e9), rel=2e-3)


def test_activations_of_a_small_deepseek_v3_are_those_that_megatron_measures() -> None:
    """NVIDIA/Megatron-LM@d98e8a64ddf3, tests/functional_tests/test_cases/mixtral,
    deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release (flash attention, fused loss).

    The last of two ranks of 1F1B holds one microbatch of 7 blocks, a prediction module and the head: 58.534
    GB are allocated between steps and 100.882 GB at most.
    """
    sizes = {
        "hidden": 7168, "layers": 14, "heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "ffn": 18432, "experts": 64,
        "experts_per_token": 8, "expert_ffn": 2048, "shared_expert_ffn": 2048, "dense_layers": 3,
        "prediction_layers": 1, "vocabulary": 258560, "sequence": 4096, "microbatch_size": 4,
        "fused_loss": True,
    }  # fmt: skip
    layout = {"expert_parallel": 8, "data_parallel": 8, "tensor_parallel": 2, "sequence_parallel": True}
    config = estimate_config(llama(**sizes), precision="mixed-fp32-gradients", zero_stage=1, **layout)
    layers = {layer.name: layer.plain for layer in estimate_layers(config)}
    rank = [(layers["moe"], 7), (layers["prediction"], 1), (layers["head"], 1)]
    held = sum(layer.after_forward * count for layer, count in rank)
    workspace = max(layer.workspace for layer, _ in rank)
    assert (held + workspace) / 1e9 == pytest.approx(100.882 - 58.534, rel=0.02)
