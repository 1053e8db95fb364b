"""Latent attention, windows, and sequences that several devices share."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, estimate_config, llama, parts
from zbv_models.estimate.config_model import ModelConfig
from zbv_models.estimate.part import Part
from zbv_models.estimate.problem_document import estimate_layers

A, H, Q, KV, PLAIN, ROTATED, VALUE = 16, 2048, 512, 128, 64, 32, 48


def latent(**changes: Any) -> ModelConfig:
    """Multi-head latent attention with sixteen heads."""
    given = {
        "hidden": H, "layers": 2, "heads": A, "q_lora_rank": Q, "kv_lora_rank": KV, "ffn": 1024,
        "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED, "v_head_dim": VALUE, "sequence": 1024,
    }  # fmt: skip
    return llama(**{**given, **changes})


def attention(model: ModelConfig, **degrees: Any) -> Part:
    return parts(model, **degrees)["attention"]


def test_latent_attention_has_the_matrices_of_deepseek_v2() -> None:
    """DeepSeek-AI 2024, DeepSeek-V2, §2.1: down, up and back; a norm of each latent vector."""
    matrices = H * (Q + KV + ROTATED) + Q * A * (PLAIN + ROTATED) + KV * A * (PLAIN + VALUE) + A * VALUE * H
    assert attention(latent()).parameters.total == matrices + H + Q + KV
    tokens, scores = 1024, 1024**2 / 2 * A * 2 * (PLAIN + ROTATED + VALUE)
    assert attention(latent()).flops.forward == 2 * tokens * matrices + scores
    assert attention(latent()).flops.backward_weight == 2 * tokens * matrices


def test_queries_may_be_projected_directly() -> None:
    direct = attention(latent(q_lora_rank=None)).parameters.total
    difference = H * A * (PLAIN + ROTATED) - (H * Q + Q * A * (PLAIN + ROTATED) + Q)
    assert direct - attention(latent()).parameters.total == difference


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
    pairs = attention(model).core.forward / (4 * model.query_width)
    assert pairs == counted


@given(st.integers(1, 300), st.integers(1, 300))
def test_pieces_of_the_sequence_attend_to_themselves(sequence: int, piece: int) -> None:
    """Counted: the pairs of each piece under a causal mask, without half of its diagonal, as for windows."""
    counted = sum(query % piece + 1 for query in range(sequence)) - sequence / 2
    model = llama(hidden=64, heads=4, sequence=sequence, window=piece, chunked=True)
    assert attention(model).core.forward / (4 * model.query_width) == counted


def test_a_window_on_latent_attention_leaves_out_pairs() -> None:
    """GLM-5 with 128 K tokens and 2048 keys per query: the scores take a thirty-second of the time."""
    full, sparse = (attention(latent(sequence=131072, window=window)) for window in (None, 2048))
    assert sparse.core.forward / full.core.forward == pytest.approx(2 * 2048 / 131072, rel=0.01)
    assert sparse.parameters == full.parameters
    assert attention(latent(window=4096)).core == attention(latent()).core


INDEXER = {"window": 256, "index_heads": 4, "index_dim": 32}


def test_an_indexer_has_its_matrices_and_compares_all_pairs() -> None:
    """DeepSeek-V3.2, §2.1: its queries come from the latent vector, and its heads share keys."""
    near, chosen = attention(latent(window=256)), attention(latent(**INDEXER))
    matrices = Q * 4 * 32 + H * (32 + 4)
    assert chosen.parameters.total - near.parameters.total == matrices + 2 * 32
    compared = 2 * 4 * 32 * 1024**2 / 2
    scores = near.core.forward * (KV + ROTATED + KV) / (PLAIN + ROTATED + VALUE)
    assert chosen.core.forward == pytest.approx(compared + scores)
    assert chosen.flops.backward_weight - near.flops.backward_weight == 2 * 1024 * matrices


def test_queries_of_an_indexer_come_from_the_stream_without_a_latent_vector() -> None:
    near, chosen = (attention(llama(hidden=H, heads=A, **sizes)) for sizes in ({"window": 256}, INDEXER))
    assert chosen.parameters.total - near.parameters.total == H * 4 * 32 + H * (32 + 4) + 2 * 32


def test_what_an_indexer_keeps() -> None:
    """Per token: its queries, keys and weights, and the numbers of the chosen tokens; no scores."""
    near, chosen = (attention(llama(hidden=H, heads=A, **sizes)) for sizes in ({"window": 256}, INDEXER))
    widths = 4 * 32 + 32 + 4
    assert chosen.after_forward - near.after_forward == 4096 * (2 * widths + 4 * 256)
    assert chosen.after_input - near.after_input == 4096 * 2 * widths


def test_a_gate_is_as_wide_as_the_queries() -> None:
    """Qwen3-Next: its product is part of the one to queries, and is kept as the heads' output is."""
    plain, gated = (attention(llama(kv_heads=8, output_gate=gate)) for gate in (False, True))
    assert gated.parameters.total - plain.parameters.total == 4096 * 4096
    assert gated.after_forward - plain.after_forward == 4096 * 2 * 2 * 4096
    assert gated.flops.forward - plain.flops.forward == 2 * 4096 * 4096 * 4096


def test_second_norms_keep_what_attention_and_mlp_give() -> None:
    """Gemma 2, §2."""
    for name in ("attention", "mlp"):
        plain, normed = (parts(llama(post_norms=post))[name] for post in (False, True))
        assert normed.parameters.total - plain.parameters.total == 4096
        assert normed.after_forward - plain.after_forward == 4096 * (2 * 4096 + 4)
        assert normed.moved.forward - plain.moved.forward == 2 * 2 * 4096 * 4096


def test_every_second_block_may_see_everything() -> None:
    config = estimate_config(llama(layers=4, window=128, full_attention_every=2))
    layers = estimate_layers(config)[1:-1]
    assert [layer.name for layer in layers] == ["local.0", "global.1", "local.2", "global.3"]
    assert layers[0].plain.times.forward < layers[1].plain.times.forward
    assert layers[0].plain == layers[2].plain


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
