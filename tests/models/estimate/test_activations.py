"""What a microbatch keeps after F and after I, against published formulas and measurements."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, gpt, llama, parts, preset_config
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.part import Held, after_forward, after_input
from zbv_models.estimate.sections import preset

ZERO_BUBBLE = ("gpt-1.5b", "gpt-6.2b", "gpt-14.6b", "gpt-28.3b")
SMALL = gpt(hidden=64, heads=4, sequence=32, vocabulary=400)


def published(tensors: Iterable[Held]) -> int:
    """Bytes after F as the papers count them, without the statistics of norms."""
    return after_forward(each for each in tensors if "statistics" not in each.name)


def block(model: Transformer, t: int = 1, sequence_parallel: bool = False) -> list[Held]:
    found = parts(model, tensor=t, sequence_parallel=sequence_parallel)
    return [*found["attention"].tensors, *found["mlp"].tensors]


def without_scores(tensors: list[Held]) -> list[Held]:
    return [each for each in tensors if "core_attn" not in each.modules]


@given(
    s=st.integers(1, 50).map(lambda n: 4 * n),
    b=st.integers(1, 4),
    width=st.integers(1, 50),
    t=st.sampled_from((1, 2, 4)),
)
def test_blocks_match_the_table_of_korthikanti(s: int, b: int, width: int, t: int) -> None:
    """Korthikanti et al. 2022, table 2, all six rows."""
    a, h = 4, 4 * width
    model = gpt(hidden=h, heads=a, sequence=s, microbatch_size=b)
    sbh, scores = s * b * h, 5 * a * s * s * b
    assert published(block(model)) == 34 * sbh + scores
    assert published(block(model, t)) == 10 * sbh + (24 * sbh + scores) // t
    assert published(block(model, t, True)) == (34 * sbh + scores) // t
    assert published(without_scores(block(model, t))) == 10 * sbh + 24 * sbh // t
    assert (
        published(
            [each for each in block(model, t, True) if not each.modules or "core_attn" not in each.modules]
        )
        == 34 * sbh // t
    )
    assert after_forward(each for each in parts(model)["attention"].tensors if each.is_input) == 2 * sbh


@pytest.mark.parametrize(("hidden", "heads", "scores"), [(12288, 96, 80), (20480, 128, 64)])
def test_scores_of_gpt_3_and_mt_nlg(hidden: int, heads: int, scores: int) -> None:
    """Korthikanti et al. 2022, §5: 5as/h is 80 and 64, so selective recomputation saves 70 % and 65 %."""
    tensors = block(gpt(hidden=hidden, heads=heads))
    core = after_forward(each for each in tensors if "core_attn" in each.modules)
    assert core == pytest.approx(scores * 2048 * 2 * hidden)
    assert core / published(tensors) == pytest.approx(scores / (34 + scores))


@given(st.sampled_from(("plain", "flash")), st.booleans(), st.sampled_from(("layernorm", "rmsnorm")))
def test_queued_weight_gradients_read_32_s_b_h(attention: str, dropout: bool, norm: str) -> None:
    """Qi et al. 2023, table 1: inputs and output gradients of four linear layers."""
    model = but(SMALL, attention=attention, dropout=dropout, norm=norm)
    assert after_input(block(model)) == 32 * model.tokens * model.hidden


def test_a_llama_block_is_the_sum_of_its_tensors() -> None:
    """In bytes per token: RMSNorm, grouped heads, a gate."""
    model = llama(ffn=14336, kv_heads=8)
    h, kv, f = 4096, 1024, 14336
    for_backward = 2 * (h + h + h + 2 * kv + h) + 4 * 32 + 2 * (h + h + 2 * f + f) + 2 * 4
    for_weights = 2 * (h + (h + 2 * kv) + h + h) + 2 * (h + 2 * f + f + h)
    assert after_forward(block(model)) == for_backward * model.tokens
    assert after_input(block(model)) == for_weights * model.tokens


def test_gradients_of_a_sum_over_the_group_stay_whole() -> None:
    """Two of the inputs and two of the gradients are as wide as the residual stream, 8 s b h in all. Sequence
    parallelism divides only the inputs."""
    sbh = SMALL.tokens * 64
    assert after_input(block(SMALL, 4)) == 8 * sbh + 24 * sbh // 4
    assert after_input(block(SMALL, 4, True)) == 4 * sbh + 28 * sbh // 4


def test_the_head_keeps_logits_in_32_bits() -> None:
    """Korthikanti et al. 2022, §4.3: 2 s b h + 2 s b h + 4 s b V; after I the input and logits' gradient."""
    tokens, targets = SMALL.tokens, 8 * SMALL.tokens
    held = parts(SMALL)["head"].tensors
    assert published(held) == 4 * tokens * 64 + 4 * tokens * 400 + targets
    assert after_input(held) == 2 * tokens * 64 + 2 * tokens * 400
    assert (
        published(parts(SMALL, tensor=4, sequence_parallel=True)["head"].tensors)
        == tokens * 64 + tokens * 400 + targets
    )


def test_the_embedding_keeps_tokens_and_then_a_gradient() -> None:
    tokens, positions = 8 * SMALL.tokens, 8 * 32
    plain = parts(but(SMALL, positions="rotary", dropout=False))["embedding"].tensors
    assert after_forward(plain) == tokens
    assert after_input(plain) == tokens + 2 * SMALL.tokens * 64
    learned = parts(SMALL)["embedding"].tensors
    assert after_forward(learned) == tokens + positions + SMALL.tokens * 64
    assert after_input(learned) == tokens + positions + 2 * SMALL.tokens * 64 + 2 * 32 * 64


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_memory_matches_the_measurements_of_the_zero_bubble_paper(name: str) -> None:
    """Qi et al. 2023, table 4, within 5 %.

    The fullest rank of 1F1B is the second, which holds p - 1 microbatches of one block more than the first;
    ZB-2p holds up to 2p - 1 there, p more than 1F1B.
    """
    config, measured = preset_config(name), preset(name).published
    p, blocks = config.parallel.pp_degree, measured["stage_layers"]
    block = next(layer for layer in estimate_layers(config) if layer.name == "block")
    activations, static = blocks * block.plain.after_forward / 1e9, blocks * block.static.total / 1e9
    assert static + (p - 1) * activations == pytest.approx(measured["memory_gb"]["1f1b"], rel=0.05)
    grown = measured["memory_gb"]["zb-2p"] - measured["memory_gb"]["1f1b"]
    assert p * activations == pytest.approx(grown, rel=0.06)
