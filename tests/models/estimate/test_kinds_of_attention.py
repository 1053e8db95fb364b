"""Latent attention, windows, and sequences that several devices share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, estimate_config, llama, parts
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.part import Part

A, H, Q, KV, PLAIN, ROTATED, VALUE = 16, 2048, 512, 128, 64, 32, 48


def latent(**changes: Any) -> Transformer:
    """Multi-head latent attention with sixteen heads."""
    given = {
        "hidden": H, "layers": 2, "heads": A, "q_lora_rank": Q, "kv_lora_rank": KV, "ffn": 1024,
        "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED, "v_head_dim": VALUE, "sequence": 1024,
    }  # fmt: skip
    return llama(**{**given, **changes})


def attention(model: Transformer, **degrees: Any) -> Part:
    return parts(model, **degrees)["attention"]


def test_latent_attention_has_the_matrices_of_deepseek_v2() -> None:
    """DeepSeek-AI 2024, DeepSeek-V2, §2.1: down, up and back; a norm of each latent vector."""
    matrices = H * (Q + KV + ROTATED) + Q * A * (PLAIN + ROTATED) + KV * A * (PLAIN + VALUE) + A * VALUE * H
    assert attention(latent()).parameters.total == matrices + H + Q + KV
    tokens, scores = 1024, 1024**2 / 2 * A * 2 * (PLAIN + ROTATED + VALUE)
    assert attention(latent()).flops.forward == 2 * tokens * matrices + scores
    assert attention(latent()).flops.backward_weight == 2 * tokens * matrices


def test_scores_of_latent_attention_have_wide_keys_and_narrow_values() -> None:
    """I computes three products as wide as keys and two as wide as values."""
    core, pairs = attention(latent()).core, 1024**2 / 2
    assert core.forward == pairs * A * 2 * (PLAIN + ROTATED + VALUE)
    assert core.backward_input == pairs * A * 2 * (3 * (PLAIN + ROTATED) + 2 * VALUE)


def test_what_latent_attention_keeps() -> None:
    """Per token in 16 bits: stream, its norm, both latent vectors twice, queries, keys, values, output."""
    heads = A * (2 * (PLAIN + ROTATED) + VALUE) + A * VALUE
    wide = 2 * (2 * H + 2 * (Q + KV) + heads)
    assert attention(latent()).after_forward == 1024 * (wide + 3 * 4 + 4 * A)
    waiting = (H + Q + KV + ROTATED) + (KV + A * (PLAIN + VALUE)) + (Q + A * (PLAIN + ROTATED))
    assert attention(latent()).after_input == 1024 * 2 * (waiting + A * VALUE + H)


def test_tensor_parallelism_keeps_projections_down_whole() -> None:
    whole, part = attention(latent()), attention(latent(), tensor=4, sequence_parallel=True)
    assert part.parameters == whole.parameters
    assert part.parameters.replicated == H * (Q + KV + ROTATED) + H + Q + KV
    assert part.flops.forward == whole.flops.forward / 4  # each computes the projections down for its tokens
    without = attention(latent(), tensor=4)
    down = 2 * 1024 * H * (Q + KV + ROTATED)
    assert without.flops.forward == pytest.approx((whole.flops.forward - down) / 4 + down)


def test_latent_vectors_are_gathered_instead_of_the_stream() -> None:
    """F gathers them and scatters the output; I the other way; they are gathered again before W."""
    exchange = attention(latent(), tensor=4, sequence_parallel=True).exchanges[0]
    gathered, h = 2 * 1024 * (Q + KV + ROTATED) * 3 / 4, 2 * 1024 * H * 3 / 4
    assert exchange.sent.forward == exchange.sent.backward_input == gathered + h
    assert exchange.sent.backward_weight == gathered


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_window_leaves_out_pairs(sequence: int, window: int) -> None:
    """Counted: the pairs of a causal window, without the half of its diagonal that the formula leaves out."""
    counted = sum(min(query, window) for query in range(1, sequence + 1)) - min(window, sequence) / 2
    model = llama(hidden=64, heads=4, sequence=sequence, window=window)
    pairs = attention(model).core.forward / (4 * model.heads * model.width_of_head)
    assert pairs == counted


@given(st.integers(1, 300), st.integers(1, 300))
def test_pieces_of_the_sequence_attend_to_themselves(sequence: int, piece: int) -> None:
    """Counted: the pairs of each piece under a causal mask, without half of its diagonal, as for windows."""
    counted = sum(query % piece + 1 for query in range(sequence)) - sequence / 2
    model = llama(hidden=64, heads=4, sequence=sequence, window=piece, chunked=True)
    assert attention(model).core.forward / (4 * model.heads * model.width_of_head) == counted


def test_devices_of_a_sequence_have_equal_work() -> None:
    """Each has an early and a late piece of the sequence."""
    alone, shared = attention(llama()), attention(llama(), context=4)
    assert shared.flops.forward == alone.flops.forward / 4
    assert shared.after_forward == alone.after_forward / 4
    assert shared.parameters == alone.parameters


@pytest.mark.parametrize(("gathers", "calls"), [(False, (3, 3)), (True, (1, 2))])
def test_keys_and_values_are_exchanged(gathers: bool, calls: tuple[int, int]) -> None:
    """A device sends its quarter to three others in F, and twice in I: with gradients."""
    part = attention(llama(kv_heads=8), context=4, gathers_context=gathers)
    (exchange,) = (each for each in part.exchanges if each.group == "context")
    piece = 2 * 1024 * 2 * 8 * 128
    assert exchange.sent.forward == 3 * piece
    assert exchange.sent.backward_input == 6 * piece
    assert (exchange.calls.forward, exchange.calls.backward_input) == calls


def test_the_context_s_link_takes_its_time() -> None:
    config = estimate_config(llama(kv_heads=8), context_parallel=4)
    free = but(config, device=but(config.device, context_parallel_overlap=1.0))
    block, without = (estimate_layers(each)[1].plain.times for each in (config, free))
    piece = 2 * 1024 * 2 * 8 * 128
    assert block.forward - without.forward == pytest.approx(3 * piece / 50e9 * 1e6 + 3 * 7)
