"""Copies to the host on the model of CUDA: streams, pinned memory, and memory that is free too early."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from support.fake_nccl.pipeline import ModelRun, run_plan
from support.fake_nccl.simulation import ModelError
from support.fake_nccl.stages import MovedFakeStage
from support.orders import copied_at_random, random_orders
from support.plans import unit_problem
from zbv_worker.execution import copies


def run(seed: int, p: int = 2, **changes: Any) -> None:
    problem = unit_problem(p, 6)
    orders = copied_at_random(random_orders(problem, Random(seed)), Random(seed))
    assert orders.copies is not None
    run_plan(problem, orders, ModelRun(steps=3, stage=MovedFakeStage, seed=seed, **changes))


@pytest.mark.parametrize("seed", range(6))
def test_copies_run_during_computation(seed: int) -> None:
    run(seed)


def test_copies_run_on_four_ranks_with_replicas_and_evaluations() -> None:
    run(7, p=4, replicas=2, is_evaluated=True)


def test_memory_is_not_freed_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies._Stream, "wait", lambda self, ended: None)
    with pytest.raises(ModelError, match=r"may be reused, while copy|may not have written yet"):
        run(0)


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
        run(0)


def test_the_buffers_of_the_host_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    with pytest.raises(ModelError, match="not pinned"):
        run(0)
