"""Orders of executors: the published examples, the executors' own rules, and valid orders at every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import uniform_document
from zbv_models.fixed_orders.schedules import (
    TORCH_SCHEDULES,
    megatron_groups,
    megatron_schedule,
    torch_schedule,
)
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.problem import LETTERS
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders


@pytest.mark.parametrize(
    ("m", "group", "microbatches", "chunks"),
    [
        # megatron/core/model_parallel_config.py, microbatch_group_size_per_vp_stage: two examples. The second
        # has its chunks in forward_backward_pipelining_with_interleaving of schedules.py ("PP2 N3M5").
        (4, 2, [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1]),
        (5, 3, [0, 1, 2, 0, 1, 2, 3, 4, 3, 4], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]),
    ],
)
def test_megatrons_examples(m: int, group: int, microbatches: list[int], chunks: list[int]) -> None:
    orders = megatron_schedule(2, m, 2, group).orders()
    for rank in (0, 1):
        part = orders.slice_of(rank)
        # Backwards use the same table with the chunks in reverse (get_model_chunk_id).
        for letter, expected in (("F", chunks), ("B", [1 - chunk for chunk in chunks])):
            own = orders.letter[part] == LETTERS.index(letter)
            assert orders.microbatch[part][own].tolist() == microbatches
            assert (orders.stage[part][own] // 2).tolist() == expected


def test_megatrons_warm_up() -> None:
    """get_pp_rank_microbatches: 2 (p - rank - 1) + (chunks - 1) group forwards before the first backward.

    The forward of the first 1F1B step follows them.
    """
    orders = megatron_schedule(4, 16, 3, 6).orders()
    for rank in range(4):
        letters = orders.letter[orders.slice_of(rank)].tolist()
        assert letters.index(LETTERS.index("B")) == 2 * (4 - rank - 1) + 2 * 6 + 1


@given(
    st.sampled_from(["megatron", *TORCH_SCHEDULES]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(1, 12),
)
def test_orders_are_complete_and_free_of_deadlocks_or_refused(
    name: str, p: int, m: int, chunks: int | None, group: int
) -> None:
    is_offered = p > 1 and group in megatron_groups(p, m, chunks or 1)
    try:
        if name == "megatron":
            schedule = megatron_schedule(p, m, chunks or 1, group if chunks in (2, 3) else None)
        else:
            schedule = torch_schedule(name, p, m, chunks)
    except InvalidInput:
        assert name != "megatron" or not is_offered
        return
    assert name != "megatron" or chunks in (None, 1) or is_offered
    placement = schedule.placement
    document = uniform_document(placement.pp_degree, schedule.microbatches) | {"placement": placement.kind}
    if placement.kind == "loop":
        document["chunks"] = placement.chunks
    problem = parse_problem(document)
    verify_orders(problem, schedule.orders())
    assert evaluate(problem, schedule.orders()).span > 0


def test_unknown_names_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one of GPipe"):
        torch_schedule("zbv", 2, 4)
    for arguments, message in (
        ((2, 4, 1, 2), "only several take turns"),
        ((1, 4, 2), "at least 2"),
        ((2, 5, 2, 2), "last group has 1"),
    ):
        with pytest.raises(InvalidInput, match=message):
            megatron_schedule(*arguments)
    assert megatron_groups(2, 5, 2) == (3, 5)
    assert torch_schedule("interleaved1f1b", 2, 4).name == "Interleaved1F1B"
