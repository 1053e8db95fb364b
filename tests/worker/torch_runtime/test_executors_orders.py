"""The solver's orders of PyTorch's schedules are those that the installed PyTorch makes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules
from zbv_models.fixed_orders.schedules import TORCH_SCHEDULES, torch_schedule
from zbv_solver.errors import InvalidInput

LETTERS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


def order_of_torch(name: str, p: int, m: int, chunks: int) -> list[list[str]]:
    """The lists of PyTorch's own generator, without its constructor, which needs stages and processes."""
    made: Any = object.__new__(schedules.get_schedule_class(name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches = p, chunks, m
    made._num_stages = made.num_stages = p * chunks
    made._stages = [None] * chunks
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    if name in ("GPipe", "1F1B"):
        lists = made._get_pipeline_order()
    else:
        lists = {rank: made._calculate_single_rank_operations(rank) for rank in range(p)}
    return [
        [
            f"{each.stage_index}{LETTERS[each.computation_type.name]}{each.microbatch_index}"
            for action in lists[rank]
            if action is not None and action.computation_type.name != "REDUCE_GRAD"
            for each in action.sub_actions or (action,)
        ]
        for rank in range(p)
    ]


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_orders_are_pytorchs(name: str) -> None:
    compared = 0
    for p, m, chunks in [(p, m, c) for p in (1, 2, 3, 4, 6) for m in range(1, 19) for c in (1, 2, 3)]:
        try:
            schedule = torch_schedule(name, p, m, chunks)
        except InvalidInput:
            continue
        ours, theirs = schedule.orders().all_text(), order_of_torch(name, p, m, chunks)
        if name == "1F1B":
            # PyTorch's description of the last rank calls its first forward 0F1; it runs 0F0.
            ours[-1], theirs[-1] = (
                ["".join(filter(str.isalpha, each)) for each in row] for row in (ours[-1], theirs[-1])
            )
        assert ours == theirs, (p, m, chunks)
        compared += 1
    assert compared > 30
