"""What an executor does by itself, without a layout: the numbers that its functions compute."""

from __future__ import annotations

import pytest
from zbv_models.fixed_orders.executor_cut import dealt, even_cut
from zbv_models.fixed_orders.schedules import Schedule, torch_schedule
from zbv_solver.problem.stages import Placement


def megatron(p: int, chunks: int = 1) -> Schedule:
    placement = Placement.of("loop", p, chunks) if chunks > 1 else Placement.of("single", p)
    return Schedule("megatron", "any", placement, 4 * p)


def blocks_of(executor: str, letters: str, schedule: Schedule) -> tuple[list[int], str]:
    """Transformer layers of every stage, and the remark."""
    found = even_cut(executor, list(letters), schedule)
    stages = [letters[begin:end] for begin, end in zip(found.bounds[:-1], found.bounds[1:], strict=True)]
    return [stage.count("t") for stage in stages], found.remark


@pytest.mark.parametrize(
    ("letters", "p", "chunks", "expected"),
    [
        # get_num_layers_to_build: num_layers / pp / vpp, whatever the layers are.
        ("E" + "t" * 8 + "L", 2, 1, [4, 4]),
        ("E" + "t" * 8 + "L", 2, 2, [2, 2, 2, 2]),
        ("E" + "t" * 8 + "mL", 4, 1, [2, 2, 2, 2]),
        ("t" * 6, 3, 1, [2, 2, 2]),
    ],
)
def test_megatron_deals_all_layers(letters: str, p: int, chunks: int, expected: list[int]) -> None:
    assert blocks_of("megatron", letters, megatron(p, chunks)) == (expected, "")


@pytest.mark.parametrize(
    ("blocks", "p", "expected", "words"),
    [
        # DeepSeek-V3's recipe: 15 stages of four, and one for the last.
        (61, 16, [4] * 15 + [1], "fewer on the last stages"),
        # As with --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split.
        (126, 16, [7, *[8] * 14, 7], "one less at both ends"),
    ],
)
def test_where_megatron_refuses_the_remark_says_so(
    blocks: int, p: int, expected: list[int], words: str
) -> None:
    counts, remark = blocks_of("megatron", "E" + "t" * blocks + "L", megatron(p))
    assert counts == expected
    assert f"Megatron-LM by itself does not divide {blocks} transformer layers into {p} stages" in remark
    assert words in remark


@pytest.mark.parametrize(
    ("blocks", "p", "expected"),
    [
        # _generate_llm_fqn_per_model_part(p, blocks) of torchtitan b5bcd76c.
        (8, 2, [4, 4]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (32, 4, [8, 9, 8, 7]),
        (3, 1, [3]),
    ],
)
def test_torchtitan_counts_embedding_and_output_as_a_layer_each(
    blocks: int, p: int, expected: list[int]
) -> None:
    schedule = torch_schedule("1F1B", p, 4 * p)
    assert blocks_of("torchtitan", "E" + "t" * blocks + "L", schedule) == (expected, "")


def test_parts_of_modules_stay_with_them_and_pytorch_has_no_rule() -> None:
    letters = ["E", "t", "", "t", "", "t", "", "", "L"]
    assert even_cut("torch", letters, torch_schedule("1F1B", 3, 4)).bounds == (0, 3, 5, 9)
    assert even_cut("torch", letters, torch_schedule("1F1B", 2, 4)).remark == ""
    assert dealt(3, 2) == [2, 1]
