"""Operations of F, I and W against published formulas and totals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import gpt, llama, parts
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.shapes import PerAction

gpts = st.builds(
    lambda width, layers, vocabulary, sequence, b: gpt(
        hidden=4 * width, heads=4, layers=layers, vocabulary=vocabulary, sequence=sequence, microbatch_size=b
    ),
    *(st.integers(1, 500) for _ in range(5)),
)


def block_flops(model: Transformer) -> PerAction:
    return parts(model)["attention"].flops + parts(model)["mlp"].flops


def per_microbatch(model: Transformer, *, recomputed: bool = False) -> float:
    block, head = block_flops(model), parts(model)["head"].flops
    return model.layers * (block.total + recomputed * block.forward) + head.total


@given(gpts)
def test_a_block_has_the_operations_of_the_zero_bubble_paper(model: Transformer) -> None:
    """Qi et al. 2023, table 1: s b h (24h + 4s), s b h (24h + 8s), s b h 24h."""
    s, b, h = model.sequence, model.microbatch_size, model.hidden
    expected = PerAction(s * b * h * (24 * h + 4 * s), s * b * h * (24 * h + 8 * s), s * b * h * 24 * h)
    assert block_flops(model) == expected


@given(gpts)
def test_a_step_has_the_operations_of_megatron(model: Transformer) -> None:
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


def test_flash_attention_skips_masked_scores_and_computes_scores_twice() -> None:
    """Dao 2023, §4.1: half for a causal mask, and a backward of 2.5 forwards."""
    plain = parts(llama(attention="plain"))["attention"].core
    causal, full = parts(llama())["attention"].core, parts(llama(causal=False))["attention"].core
    assert full.forward == plain.forward == 2 * causal.forward
    assert plain.backward_input == 2 * plain.forward
    assert full.backward_input == 2.5 * full.forward
    assert causal.backward_input == 2.5 * causal.forward
