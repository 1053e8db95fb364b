"""Operations of F, I and W against published formulas and totals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import gpt, llama, parts
from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.config_model import ModelConfig

gpts = st.builds(
    lambda width, layers, vocabulary, sequence, b: gpt(
        hidden=4 * width, heads=4, layers=layers, vocabulary=vocabulary, sequence=sequence, microbatch_size=b
    ),
    *(st.integers(1, 500) for _ in range(5)),
)


def block_flops(model: ModelConfig) -> PerAction:
    return parts(model)["attention"].flops + parts(model)["mlp"].flops


def per_microbatch(model: ModelConfig, *, recomputed: bool = False) -> float:
    block, head = block_flops(model), parts(model)["head"].flops
    return model.layers * (block.total + recomputed * block.forward) + head.total


@given(gpts)
def test_a_block_has_the_operations_of_the_zero_bubble_paper(model: ModelConfig) -> None:
    """Qi et al. 2023, table 1: s b h (24h + 4s), s b h (24h + 8s), s b h 24h."""
    s, b, h = model.sequence, model.microbatch_size, model.hidden
    expected = PerAction(s * b * h * (24 * h + 4 * s), s * b * h * (24 * h + 8 * s), s * b * h * 24 * h)
    assert block_flops(model) == expected


@given(gpts)
def test_a_step_has_the_operations_of_megatron(model: ModelConfig) -> None:
    """Narayanan et al. 2021, equation 3, with recomputation; appendix: 72 for 96 and 12 for 16 without."""
    b, s, n, h, v = (
        model.microbatch_size,
        model.sequence,
        model.layers,
        model.hidden,
        model.vocabulary,
    )
    with_recomputation = 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    without = 72 * b * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert per_microbatch(model, recomputed=True) == pytest.approx(with_recomputation)
    assert per_microbatch(model) == pytest.approx(without)


def test_training_gpt_3_took_3_14e23_operations() -> None:
    """Brown et al. 2020, table D.1: 300 billion tokens, without attention's scores."""
    model = gpt(hidden=12288, layers=96, heads=96, vocabulary=50257)
    scores = model.layers * parts(model)["attention"].core.total
    per_token = (per_microbatch(model) - scores) / model.tokens
    assert per_token * 300e9 == pytest.approx(3.14e23, rel=2e-3)


def test_training_llama_3_405b_took_3_8e25_operations() -> None:
    """Grattafiori et al. 2024, §1 and §3: 15.6 trillion tokens; 6 per parameter and token, without scores."""
    shape = {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocabulary": 128256}
    model = llama(**shape)
    per_token = (per_microbatch(model) - model.layers * parts(model)["attention"].core.total) / model.tokens
    assert per_token * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


def test_scores_have_no_weight_gradient_and_linear_layers_split_evenly() -> None:
    model = llama()
    linear = block_flops(model).backward_weight
    core = parts(model)["attention"].core
    assert core.backward_weight == 0
    assert (
        parts(model)["mlp"].flops.forward
        == parts(model)["mlp"].flops.backward_input
        == parts(model)["mlp"].flops.backward_weight
    )
    assert block_flops(model).forward == linear + core.forward
    assert block_flops(model).backward_input == linear + core.backward_input


def test_flash_attention_skips_masked_scores_and_computes_scores_twice() -> None:
    """Dao 2023, §4.1: half for a causal mask, and a backward of 2.5 forwards."""
    plain = parts(llama(attention="plain"))["attention"].core
    causal, full = parts(llama())["attention"].core, parts(llama(causal=False))["attention"].core
    assert full.forward == plain.forward == 2 * causal.forward
    assert plain.backward_input == 2 * plain.forward
    assert full.backward_input == 2.5 * full.forward
    assert causal.backward_input == 2.5 * causal.forward


def test_fewer_key_heads_shrink_only_the_projections() -> None:
    grouped, whole = llama(kv_heads=8), llama()
    h, tokens = whole.hidden, whole.tokens
    saved = 2 * tokens * h * 2 * (whole.kv_width - grouped.kv_width)
    assert parts(whole)["attention"].flops.forward - parts(grouped)["attention"].flops.forward == saved
    assert parts(whole)["attention"].core == parts(grouped)["attention"].core


def test_a_gate_adds_half_an_mlp() -> None:
    assert parts(llama())["mlp"].flops.forward == 1.5 * parts(llama(gated=False))["mlp"].flops.forward
