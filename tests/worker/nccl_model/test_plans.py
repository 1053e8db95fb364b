"""The real transport and executor run plans on the model of NCCL; the benchmark runs more of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from support.fake_nccl.communicators import NcclModes
from support.fake_nccl.families import FAMILIES, PAIRED_FAMILIES, Plan, stated_kernels
from support.fake_nccl.pipeline import FIRST_TIMES, ModelRun, run_plan
from support.fake_nccl.simulation import Deadlock, ModelError
from support.fake_nccl.stages import MovedFakeStage, NestedFakeStage
from support.orders import copied_at_random, random_orders
from support.plans import unit_problem
from zbv_worker.execution import copies
from zbv_worker.execution.turns import Half

V, RANDOM, LOOP = "V, searched", "V, random order", "loop of 2 chunks, searched"


@cache
def plan_of(family: str, p: int = 4, m: int = 4) -> Plan:
    return FAMILIES[family](p, m)


def run(plan: Plan, slots: int | None = None, replicas: int = 1, **changes: object) -> None:
    """Run a plan with as many kernels at once as the transport states."""
    if slots is None:
        slots = stated_kernels(plan, replicas)
    device = replace(FIRST_TIMES, kernel_slots=slots, **changes.pop("device", {}))  # type: ignore[arg-type]
    how = ModelRun(device=device, replicas=replicas, **changes)  # type: ignore[arg-type]
    for use in run_plan(*plan, how):
        assert use.kernels <= slots


@pytest.mark.parametrize(
    ("family", "seed", "look_ahead"),
    [
        ("1F1B", 0, 1),
        ("ZB-H1", 0, 3),
        ("interleaved 1F1B, 3 chunks", 0, 1),
        (LOOP, 1, 3),
        (RANDOM, 0, 1),
        (V, 1, 3),
    ],
)
def test_a_plan_runs_with_as_many_kernels_as_are_stated(family: str, seed: int, look_ahead: int) -> None:
    run(plan_of(family), seed=seed, look_ahead=look_ahead)


@pytest.mark.parametrize("family", ["1F1B", V])
def test_a_plan_hangs_with_one_kernel_at_once(family: str) -> None:
    with pytest.raises(Deadlock, match=r"(send|receive) on channel .* waits"):
        run(plan_of(family), slots=1)


def test_replicas_all_ranks_and_those_with_tied_parameters_add_numbers_up() -> None:
    plan, ties = plan_of(V, 4, 2), ((0, 3), (0, 2), (1, 2, 3))
    slots = stated_kernels(plan, 2, sums_over_ranks=True, ties=ties)
    run(plan, slots, replicas=2, sums_over_ranks=True, ties=ties)


def test_replicas_gather_parameters_and_sum_parts_of_gradients() -> None:
    run(plan_of(V, 2, 3), replicas=2, is_sharded=True, steps=3)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_sums_may_connect_in_the_first_step(is_sharded: bool) -> None:
    """NCCL_RUNTIME_CONNECT=1 is in force if the process has used NCCL before."""
    run(plan_of(V, 2, 3), replicas=2, is_sharded=is_sharded, nccl=NcclModes(runtime_connect=True))


def test_evaluations_run_before_steps() -> None:
    run(plan_of(RANDOM), is_evaluated=True)


@pytest.mark.parametrize("family", ["1F1B", V])
def test_two_ranks_need_two_kernels_at_once(family: str) -> None:
    plan = plan_of(family, 2, 4)
    assert stated_kernels(plan) == 2
    run(plan)


@pytest.mark.parametrize(
    "device",
    [{"slots_at_random": True}, {"sms_full": True}, {"connections": 32}],
    ids=["random slots", "full SMs", "32 connections"],
)
def test_a_plan_runs_with(device: dict[str, object]) -> None:
    run(plan_of(V), device=device)


def test_a_plan_runs_when_small_sends_are_buffered() -> None:
    run(plan_of(V), nccl=NcclModes(buffered_sends=8))


@pytest.mark.parametrize(
    "device",
    [{"launch_order": "serial"}, {"launch_order": "start"}, {"connections": 2}, {"pool_streams": 2}],
    ids=["serial launches", "launches in order", "2 connections", "2 streams"],
)
def test_a_plan_hangs_with(device: dict[str, object]) -> None:
    # With one receive ahead, as over NCCL, only some runs hang with launches in order.
    with pytest.raises(Deadlock):
        run(plan_of(V), device=device, look_ahead=3)


@pytest.mark.parametrize("sizes", ["equal", "headers"])
def test_nested_values_arrive(sizes: str) -> None:
    run(plan_of(V, 2), stage=NestedFakeStage, sizes=sizes)


@pytest.mark.parametrize("sizes", ["known", "stated"])
def test_microbatches_of_different_sizes_arrive(sizes: str) -> None:
    run(plan_of(RANDOM, 2), sizes=sizes)


def test_nothing_stays_allocated_after_a_run() -> None:
    run(plan_of(V, 2), checks_memory=True, steps=3)


REPLICAS = 2


def run_pairs(plan: Plan, kernels: int, **changes: Any) -> None:
    """Run three steps: pairs take turns from the second on."""
    device = replace(FIRST_TIMES, kernel_slots=kernels)
    changes = {"steps": 3, "replicas": REPLICAS, "has_experts": True, **changes}
    run_plan(*plan, ModelRun(device=device, **changes))


@pytest.mark.parametrize(("family", "p"), [("V, pairs", 2), ("one chunk, pairs", 3)])
def test_pairs_run_with_a_kernel_more_than_the_transport_states(family: str, p: int) -> None:
    plan = PAIRED_FAMILIES[family](p, 4)
    assert plan[1].paired is not None
    run_pairs(plan, stated_kernels(plan, REPLICAS) + 1)


def test_pairs_hang_with_one_kernel_at_once() -> None:
    with pytest.raises(Deadlock):
        run_pairs(PAIRED_FAMILIES["V, pairs"](2, 4), 1)


def test_replicas_that_order_the_halves_differently_compute_wrong_numbers() -> None:
    def disagreeing(forward: Half, backward: Half) -> None:
        halves = (forward, backward) if forward.pairs._rank % REPLICAS else (backward, forward)
        for half in halves:
            half()

    with pytest.raises(ModelError, match=r"losses|weight gradients"):
        run_pairs(PAIRED_FAMILIES["V, pairs"](2, 4), 8, overlap=disagreeing)


def run_copies(seed: int, **changes: Any) -> None:
    problem = unit_problem(2, 6)
    orders = copied_at_random(random_orders(problem, Random(seed)), Random(seed))
    assert orders.copies is not None
    run_plan(problem, orders, ModelRun(steps=3, stage=MovedFakeStage, seed=seed, **changes))


@pytest.mark.parametrize("seed", range(3))
def test_copies_run_during_computation(seed: int) -> None:
    run_copies(seed)


def test_copies_run_with_replicas_and_evaluations() -> None:
    run_copies(7, replicas=2, is_evaluated=True)


def test_memory_is_not_freed_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies._Stream, "wait", lambda self, ended: None)
    with pytest.raises(ModelError, match=r"may be reused, while copy|may not have written yet"):
        run_copies(0)


def test_a_copy_waits_for_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        def __init__(self, stream: Any):
            self._stream = stream

        def wait_event(self, event: Any) -> None:
            """Nothing."""

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    made = copies._Stream.__init__

    def deaf(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self._stream = Deaf(self._stream)

    monkeypatch.setattr(copies._Stream, "__init__", deaf)
    with pytest.raises(ModelError, match=r"(reads|overwrites) memory that .* may not have"):
        run_copies(0)


def test_the_buffers_of_the_host_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    with pytest.raises(ModelError, match="not pinned"):
        run_copies(0)
