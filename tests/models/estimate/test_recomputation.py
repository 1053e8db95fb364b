"""What recomputation drops and adds: whole layers, Megatron's modules, and torchtitan's operations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from support.estimates import estimate_config, estimate_configs, gpt, llama
from support.titan_operations import BLOCKS, block
from zbv_models.estimate.config import EstimateConfig, estimate_layers

LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
SPARSE = {"experts": 8, "experts_per_token": 2, "expert_ffn": 128, "shared_expert_ffn": 192}


@given(estimate_configs(recompute="full"))
def test_full_recomputation_keeps_only_the_input_and_adds_a_forward(config: EstimateConfig) -> None:
    for layer in estimate_layers(config):
        plain, again = layer.plain, layer.full
        if again is None:
            assert layer.name in ("embedding", "head")
            continue
        assert again.times.forward == plain.times.forward
        assert again.times.backward_input == pytest.approx(plain.times.backward_input + plain.times.forward)
        assert again.times.backward_weight == plain.times.backward_weight
        assert again.after_forward == layer.output_bytes  # the input is as large
        assert again.after_input == plain.after_input
        assert again.workspace - plain.workspace == plain.after_forward - again.after_forward


def repeated(modules: list[str], model: dict[str, Any]) -> tuple[float, float]:
    """Bytes per token that F saves, and microseconds that I takes in addition."""
    made = llama(**{"hidden": 256, "heads": 4, "layers": 2, "ffn": 512, **model})
    layer = estimate_layers(estimate_config(made, recompute="selective", recompute_modules=modules))[1]
    plain, again = layer.plain, layer.selective
    assert again is not None
    assert (again.after_input, again.times.forward) == (plain.after_input, plain.times.forward)
    assert again.workspace >= plain.workspace
    added = again.times.backward_input - plain.times.backward_input
    return (plain.after_forward - again.after_forward) / 4096, added


def time_of(products: int, values: int) -> float:
    """Microseconds of products with so many weights, and of the traffic of so many values of a token."""
    return 4096 * 1e6 * (2 * products / 100e12 + 2 * values / 1e12)


@pytest.mark.parametrize(
    ("model", "modules", "dropped", "time"),
    [
        # Outputs of 256 values; a norm reads and writes a tensor. Others are parts of the next product.
        (LATENT, ["layernorm"], 2 * 256, time_of(0, 2 * 256)),
        ({**LATENT, **SPARSE}, ["layernorm"], 2 * 2 * 256, time_of(0, 2 * 2 * 256)),
        (LATENT, ["mla_up_proj"], 2 * 4 * (2 * 48 + 24), time_of(256 * 4 * 48 + 64 * 4 * 56, 4 * 4 * 48)),
        ({}, ["mlp"], 2 * (3 * 512 + 256), time_of(3 * 256 * 512, 3 * 512 + 2 * 256)),
        (SPARSE, ["moe_act"], 2 * 2 * 128, time_of(0, 3 * 2 * 128)),
        (SPARSE, ["shared_experts"], 2 * 3 * 192, time_of(3 * 256 * 192, 3 * 192)),
    ],
)
def test_modules_can_be_computed_again(
    model: dict[str, Any], modules: list[str], dropped: int, time: float
) -> None:
    assert repeated(modules, model) == pytest.approx((dropped, time))


def test_experts_as_a_whole_have_their_parts() -> None:
    whole, time = repeated(["moe"], SPARSE)
    assert whole == (4 + 1) * 8 + 2 * 2 * (256 + 3 * 128) + 2 * 3 * 192
    assert time > repeated(["shared_experts"], SPARSE)[1]
    assert repeated(["moe", "moe_act", "shared_experts"], SPARSE) == (whole, time)


def test_selective_recomputation_drops_scores_and_computes_them_again() -> None:
    """Korthikanti et al. 2022, §5: 34 s b h remain."""
    model = gpt()
    attention, mlp = estimate_layers(estimate_config(model, recompute="selective", granularity="half"))[1:3]
    whole = estimate_layers(estimate_config(model, recompute="selective"))[1]
    assert mlp.selective is None
    scores = 5 * model.heads * model.sequence * model.tokens
    assert attention.selective is not None
    assert attention.plain.after_forward - attention.selective.after_forward == scores
    assert attention.selective.workspace - attention.plain.workspace == scores
    assert whole.selective is not None
    statistics = 2 * 8 * model.tokens
    assert whole.selective.after_forward == 34 * model.tokens * model.hidden + statistics
    added = whole.selective.times.backward_input - whole.plain.times.backward_input
    products, values = 2 * model.sequence * model.hidden, 4.5 * model.heads * model.sequence
    assert added == pytest.approx(model.tokens * 1e6 * (2 * products / 100e12 + 2 * values / 1e12))


NORMALISERS = 4 * 64 * 16
LLAMA, QWEN = BLOCKS["llama3"][-1], BLOCKS["qwen3 with experts"][-1]


@pytest.mark.parametrize(
    ("model", "products", "others"),
    [
        # wqkv, w1, w2
        (LLAMA, 98_304 + 98_304 + 32_768, 32_768 + NORMALISERS),
        # A product with a bias is saved and not counted: after wqkv, wo and w3 are the first and the third.
        ({**LLAMA, "qkv_bias": True}, 98_304 + 32_768 + 98_304, 32_768 + NORMALISERS),
        # wq, wkv_b, w1, w2
        (BLOCKS["deepseek_v3"][-1], 393_216 + 524_288 + 131_072 + 32_768, 2 * 64 * 16 * 128 + NORMALISERS),
        # wq, wkv_b, w1 and w2 of shared experts; scores (on a GPU in 4 bytes) and numbers of the chosen ones
        (BLOCKS["deepseek_v3 with experts"][-1], 393_216 + 524_288 + 65_536 + 32_768,
         2 * 64 * 16 * 128 + NORMALISERS + 2 * 384 + 1_536),
        # wqkv; no product of routed experts
        (QWEN, 524_288, 262_144 + NORMALISERS + 2 * 1_024 + 4_096),
    ],
)  # fmt: skip
def test_a_block_keeps_its_input_and_the_outputs_that_torchtitan_saves(
    model: dict[str, Any], products: int, others: int
) -> None:
    """Blocks of torchtitan 0.3.0 under ``SelectiveAC``: two sequences of 32 tokens, with torch 2.13 on a CPU.

    The bytes of flash attention were not counted. ``make torchtitan`` counts the others again.
    """
    layer = block(model)
    assert layer.selective is not None
    assert layer.selective.after_forward == 2 * 64 * 256 + products + others
    # All that is computed again exists at once, while the block's backward runs.
    again, plain = layer.selective, layer.plain
    assert again.workspace + again.after_forward == plain.workspace + plain.after_forward


def test_everything_but_attention_and_saved_products_is_computed_again() -> None:
    layer = block(LLAMA)
    assert layer.selective is not None
    added = layer.selective.times.backward_input - layer.plain.times.backward_input
    saved = 2 * 64 * 256 * (768 + 768 + 768) / 100e12 * 1e6
    core = 2.0 * 2 * 32**2 / 2 * 256 * 2 / 100e12 * 1e6
    assert added == pytest.approx(layer.plain.times.forward - saved - core)
    # With experts also their exchanges.
    shared = block(QWEN, expert_parallel=8, data_parallel=8, expert_parallel_in_node=1)
    assert shared.selective is not None
    added = shared.selective.times.backward_input - shared.plain.times.backward_input
    assert added > shared.exchanged.forward > 0
