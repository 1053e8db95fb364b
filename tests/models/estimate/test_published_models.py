"""Presets and published models: parameters, operations per token, and a measured memory."""

from __future__ import annotations

import pytest
from support.estimates import but, estimate_config, preset_config
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import model_flops, parameters_of
from zbv_models.estimate.sections import preset, preset_names

V3, PUBLISHED = preset_config("deepseek-v3"), preset("deepseek-v3").published
MODELS = [name for name in preset_names() if preset(name).model]


@pytest.mark.parametrize("name", MODELS)
def test_presets_have_the_published_parameters_and_6_operations_for_each(name: str) -> None:
    """Per token, without tables and scores (Kaplan et al. 2020, §2.1): with a window of one there are none.

    GPT-3's 3.14e23 are counted so (Brown et al. 2020, table D.1), and 3.8e25 of Llama 3.1 405B.
    """
    published, model = preset(name).published, preset_config(name).model
    without = but(model, prediction_layers=0)
    count, tables = parameters_of(without), model.vocabulary * model.stream.hidden
    counted = {
        None: parameters_of(model).total,
        "one vocabulary matrix": count.total - tables,
        "without predictions": count.total,
    }[published.get("parameters_counted")]
    assert counted == pytest.approx(published["parameters"], rel=0, abs=published.get("parameters_within", 0))
    if "without_embeddings" in published:
        within = published["without_embeddings_within"]
        assert count.total - 2 * tables == pytest.approx(published["without_embeddings"], rel=0, abs=within)
    sparse = model.experts is not None
    assert sparse == ("active" in published)
    if sparse:
        assert count.active == pytest.approx(published["active"], rel=0, abs=published["active_within"])
    if "predictions" in published:
        assert parameters_of(model).total - count.total == pytest.approx(published["predictions"], rel=0.01)
    positions = model.sequence * model.hidden if model.positions == "learned" else 0
    left_out = positions + (0 if model.tied_embeddings else tables)  # a tied table is the head's, too
    operations = gflop_per_token(but(without, window=1, attention="flash"))
    assert operations == pytest.approx(6e-9 * (count.active - left_out), rel=5e-4)


def gflop_per_token(model: Transformer) -> float:
    return model_flops(model) / model.sequence / 1e9


@pytest.mark.parametrize(
    ("model", "published", "within"),
    [
        (but(V3.model, prediction_layers=0, sequence=PUBLISHED["gflop_per_token_at"]),
         PUBLISHED["gflop_per_token"], 2e-3),
        (but(preset_config("llama-3.1-405b").model, sequence=4096), 2448, 0.011),
    ],
    ids=["DeepSeek-V3", "Llama 3.1 405B"],
)  # fmt: skip
def test_a_token_takes_the_published_operations(model: Transformer, published: float, within: float) -> None:
    """DeepSeek-AI 2025, Insights into DeepSeek-V3, table 2, for 4096 tokens and a causal mask."""
    assert gflop_per_token(model) == pytest.approx(published, rel=within)


def test_activations_of_a_small_deepseek_v3_are_those_that_megatron_measures() -> None:
    """NVIDIA/Megatron-LM@d98e8a64ddf3, tests/functional_tests/test_cases/mixtral,
    deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release (flash attention, fused loss).

    The last of two ranks of 1F1B holds one microbatch of 7 blocks, a prediction module and the head: 58.534
    GB are allocated between steps and 100.882 GB at most.
    """
    changes = {"layers": 14, "experts": 64, "vocabulary": 258560, "microbatch_size": 4, "fused_loss": True}
    model = but(V3.model, **changes, sequence=4096, product_dtype=None)
    layout = {"expert_parallel": 8, "data_parallel": 8, "tensor_parallel": 2, "sequence_parallel": True}
    config = estimate_config(model, precision="mixed-fp32-gradients", zero_stage=1, **layout)
    layers = {layer.name: layer.plain for layer in estimate_layers(config)}
    rank = [(layers["moe"], 7), (layers["prediction"], 1), (layers["head"], 1)]
    held = sum(layer.after_forward * count for layer, count in rank)
    workspace = max(layer.workspace for layer, _ in rank)
    assert (held + workspace) / 1e9 == pytest.approx(100.882 - 58.534, rel=0.02)
