"""Pairs whose halves exchange tensors run on the model of NCCL, on two streams and in one order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fake_nccl.families import PAIRED_FAMILIES, Plan, stated_kernels
from support.fake_nccl.pipeline import FIRST_TIMES, ModelRun, run_plan
from support.fake_nccl.simulation import Deadlock, ModelError
from zbv_worker.execution.turns import Half

REPLICAS = 2


def run(plan: Plan, kernels: int, **changes: Any) -> None:
    """Run three steps: pairs take turns from the second on."""
    device = replace(FIRST_TIMES, kernel_slots=kernels)
    changes = {"steps": 3, "replicas": REPLICAS, "has_experts": True, **changes}
    run_plan(*plan, ModelRun(device=device, **changes))


@pytest.mark.parametrize("family", PAIRED_FAMILIES)
def test_pairs_run_with_a_kernel_more_than_the_transport_states(family: str) -> None:
    plan = PAIRED_FAMILIES[family](2, 4)
    assert plan[1].paired is not None
    run(plan, stated_kernels(plan, REPLICAS) + 1)


def test_pairs_run_on_four_ranks() -> None:
    plan = PAIRED_FAMILIES["V, pairs"](4, 8)
    run(plan, stated_kernels(plan, REPLICAS) + 1)


def test_pairs_hang_with_one_kernel_at_once() -> None:
    with pytest.raises(Deadlock):
        run(PAIRED_FAMILIES["V, pairs"](2, 4), 1)


def test_replicas_that_order_the_halves_differently_compute_wrong_numbers() -> None:
    def disagreeing(forward: Half, backward: Half) -> None:
        halves = (forward, backward) if forward.pairs._rank % REPLICAS else (backward, forward)
        for half in halves:
            half()

    with pytest.raises(ModelError, match=r"losses|weight gradients"):
        run(PAIRED_FAMILIES["V, pairs"](2, 4), 8, overlap=disagreeing)
