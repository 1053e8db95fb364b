"""A block, the ends and a whole GPT against published formulas: parameters, operations, and memory."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, gpt, llama, parts
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import parameters_of
from zbv_models.estimate.part import Held, after_forward, after_input
from zbv_models.estimate.shapes import Degrees, Parameters, PerAction

gpts = st.builds(
    lambda width, layers, vocabulary, sequence, b: gpt(
        hidden=4 * width, heads=4, layers=layers, vocabulary=vocabulary, sequence=4 * sequence,
        microbatch_size=b,
    ),
    *(st.integers(1, 100) for _ in range(5)),
)  # fmt: skip


def published(tensors: Iterable[Held]) -> int:
    """Bytes after F as the papers count them, without the statistics of norms."""
    return after_forward(held for held in tensors if "statistics" not in held.name)


def block(model: Transformer, t: int = 1, sequence_parallel: bool = False) -> list[Held]:
    halves = parts(model, tensor=t, sequence_parallel=sequence_parallel)
    return [*halves["attention"].tensors, *halves["mlp"].tensors]


@given(gpts, st.sampled_from((1, 2, 4)))
def test_blocks_keep_what_the_table_of_korthikanti_says(model: Transformer, t: int) -> None:
    """Korthikanti et al. 2022, table 2, all six rows."""
    sbh, scores = model.tokens * model.hidden, 5 * model.heads * model.sequence * model.tokens

    def kept(sequence_parallel: bool = False, selective: bool = False) -> int:
        held = block(model, t, sequence_parallel)
        return published(each for each in held if not (selective and "core_attn" in each.modules))

    assert published(block(model)) == 34 * sbh + scores
    assert kept() == 10 * sbh + (24 * sbh + scores) // t
    assert kept(sequence_parallel=True) == (34 * sbh + scores) // t
    assert kept(selective=True) == 10 * sbh + 24 * sbh // t
    assert kept(sequence_parallel=True, selective=True) == 34 * sbh // t
    assert parts(model)["attention"].input_bytes == 2 * sbh


@given(gpts, st.sampled_from(("layernorm", "rmsnorm")), st.booleans(), st.sampled_from((1, 2, 4)))
def test_queued_weight_gradients_read_32_s_b_h(model: Transformer, norm: str, dropout: bool, t: int) -> None:
    """Qi et al. 2023, table 1: inputs and output gradients of four linear layers, whatever is between them.

    Gradients of a sum over the tensor-parallel group stay whole. Sequence parallelism divides inputs.
    """
    model = but(model, norm=norm, dropout=dropout)
    sbh = model.tokens * model.hidden
    assert after_input(block(model, t)) == 8 * sbh + 24 * sbh // t
    assert after_input(block(model, t, True)) == 4 * sbh + 28 * sbh // t


def test_a_llama_block_keeps_the_sum_of_its_tensors() -> None:
    """In bytes per token: RMSNorm, grouped heads, a gate."""
    model, h, kv, f = llama(ffn=14336, kv_heads=8), 4096, 1024, 14336
    for_backward = 2 * (h + h + h + 2 * kv + h) + 4 * 32 + 2 * (h + h + 2 * f + f) + 2 * 4
    for_weights = 2 * (h + (h + 2 * kv) + h + h) + 2 * (h + 2 * f + f + h)
    assert after_forward(block(model)) == for_backward * model.tokens
    assert after_input(block(model)) == for_weights * model.tokens


def test_the_ends_keep_tokens_and_logits() -> None:
    """Korthikanti et al. 2022, §4.3: the head keeps 2 s b h twice and 4 s b V, then logits' gradient."""
    model = gpt(hidden=64, heads=4, sequence=32, vocabulary=400)
    tokens, indices, row = model.tokens, 8 * model.tokens, 2 * 64
    for t in (1, 4):
        head = parts(model, tensor=t, sequence_parallel=t > 1)["head"].tensors
        assert published(head) == tokens * (2 * row + 4 * 400) // t + indices
        assert after_input(head) == tokens * (row + 2 * 400) // t
    plain = parts(but(model, positions="rotary", dropout=False))["embedding"].tensors
    assert (after_forward(plain), after_input(plain)) == (indices, indices + tokens * row)
    learned = parts(model)["embedding"].tensors
    assert after_forward(learned) == indices + 8 * 32 + tokens * 64
    assert after_input(learned) == indices + 8 * 32 + tokens * row + 32 * row


@given(gpts)
def test_operations_and_parameters_are_those_of_megatron_and_of_the_zero_bubble_paper(
    model: Transformer,
) -> None:
    """Qi et al. 2023, table 1, of a block; Narayanan et al. 2021, equation 3, of a step that recomputes.

    Equation 2, of parameters: 12 l h² (1 + 13/12h + (V + s)/12lh); plus the final norm, 2h.
    """
    b, s, n, h, v = model.microbatch_size, model.sequence, model.layers, model.hidden, model.vocabulary
    halves = parts(model)
    attention, mlp, head = halves["attention"], halves["mlp"], halves["head"].flops
    flops, parameters = attention.flops + mlp.flops, attention.parameters + mlp.parameters
    assert flops == PerAction(*(s * b * h * (24 * h + scores * s) for scores in (4, 8, 0)))
    step = 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    assert n * (flops.total + flops.forward) + head.total == pytest.approx(step)
    count = 12 * n * h**2 + 13 * n * h + (v + s) * h + 2 * h
    assert parameters_of(but(model, tied_embeddings=True)).total == count
    assert parameters_of(model).total == count + v * h
    assert parameters == Parameters(shared=12 * h**2 + 7 * h, replicated=6 * h)
    assert parameters.on_device(Degrees(tensor=4)) == (12 * h**2 + 7 * h) // 4 + 6 * h


@pytest.mark.parametrize("change", [{"window": 300}, {"window": 300, "chunked": True}, {}])
@given(s=st.integers(1, 300), w=st.integers(1, 300))
def test_flash_attention_computes_the_pairs_of_its_mask(change: dict[str, object], s: int, w: int) -> None:
    """Counted: the pairs of each query under a causal mask, of which the formula leaves out half a diagonal.

    A mask that is not causal has twice as many. I has 2.5 times the operations of F (Dao 2023, §4.1).
    """
    change = {key: w if key == "window" else value for key, value in change.items()}
    model = llama(hidden=64, heads=4, sequence=s, **change)
    core = parts(model)["attention"].core
    if model.chunked:
        pairs = sum(query % w + 1 for query in range(s)) - s / 2
    else:
        reach = w if model.window else s
        pairs = sum(min(query, reach) for query in range(1, s + 1)) - min(reach, s) / 2
    assert core == PerAction(4 * 64 * pairs, 2.5 * 4 * 64 * pairs)
    assert parts(but(model, causal=False))["attention"].core == core.scaled(2)
