"""torchtitan's selective recomputation: what blocks of torchtitan 0.3.0 keep under ``SelectiveAC``.

The bytes were counted in its blocks of two sequences of 32 tokens, with torch 2.13 on a CPU, except for those
of flash attention. ``make torchtitan`` counts them again.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.titan_operations import BLOCKS, block
from zbv_solver.errors import InvalidInput

INPUT = 2 * 64 * 256
NORMALISERS = 4 * 64 * 16
LLAMA, QWEN = BLOCKS["llama3"][-1], BLOCKS["qwen3 with experts"][-1]


@pytest.mark.parametrize(
    ("name", "products", "others"),
    [
        # wqkv, w1, w2
        ("llama3", 98_304 + 98_304 + 32_768, 32_768 + NORMALISERS),
        # wq, wkv_b, w1, w2
        ("deepseek_v3", 393_216 + 524_288 + 131_072 + 32_768, 2 * 64 * 16 * 128 + NORMALISERS),
        # wq, wkv_b, w1 and w2 of shared experts; scores (on a GPU in 4 bytes) and numbers of the chosen ones
        (
            "deepseek_v3 with experts",
            393_216 + 524_288 + 65_536 + 32_768,
            2 * 64 * 16 * 128 + NORMALISERS + 2 * 384 + 1_536,
        ),
        # wqkv; no product of routed experts
        ("qwen3 with experts", 524_288, 262_144 + NORMALISERS + 2 * 1_024 + 4_096),
    ],
)
def test_a_block_keeps_its_input_and_the_outputs_that_torchtitan_saves(
    name: str, products: int, others: int
) -> None:
    found = block(BLOCKS[name][-1])
    assert found.selective is not None
    assert found.selective.after_forward == INPUT + products + others


def test_everything_but_attention_and_saved_products_is_computed_again() -> None:
    found = block(LLAMA)
    assert found.selective is not None
    added = found.selective.times.backward_input - found.plain.times.backward_input
    saved = 2 * 64 * 256 * (768 + 768 + 768) / 100e12 * 1e6
    core = 2.0 * 2 * 32**2 / 2 * 256 * 2 / 100e12 * 1e6
    assert added == pytest.approx(found.plain.times.forward - saved - core)
    # All that is computed again exists at once, while the block's backward runs.
    again, plain = found.selective, found.plain
    assert again.workspace + again.after_forward == plain.workspace + plain.after_forward


def test_experts_and_their_exchanges_are_computed_again() -> None:
    alone, shared = (
        block(QWEN, expert_parallel=each, data_parallel=8, expert_parallel_in_node=1) for each in (1, 8)
    )
    assert shared.selective is not None
    assert shared.exchanged.forward > 0
    added = shared.selective.times.backward_input - shared.plain.times.backward_input
    assert added > shared.exchanged.forward
    assert alone.selective is not None
    assert alone.selective.after_forward == shared.selective.after_forward


def test_products_with_a_bias_are_saved_and_not_counted() -> None:
    plain, biased = (block({**LLAMA, "qkv_bias": each}).selective for each in (False, True))
    assert plain is not None
    assert biased is not None
    # Without the first product, wo, w3 are the first and third, and w1 and w2 are not saved.
    assert biased.after_forward - plain.after_forward == 2 * 64 * (256 + 768) - 2 * 64 * (768 + 256)


@pytest.mark.parametrize(
    "change",
    [{"recompute_modules": ["op", "mlp"]}, {"granularity": "half"}],
    ids=["with modules", "halves"],
)
def test_it_is_of_whole_blocks_and_has_no_modules(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"found op; .* Name op alone"):
        block(LLAMA, **change)
