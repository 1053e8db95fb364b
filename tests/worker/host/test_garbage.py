"""Garbage is collected between steps, never within one; afterwards everything is as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import zbv_solver
from support.plans import unit_problem
from support.thread_transport import ThreadHub
from support.trained import CPU, Remembering
from torch import Tensor, nn
from zbv_solver.plans.orders import Orders
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.process import GarbageCollection
from zbv_worker.model.spec import ModelSpec
from zbv_worker.pipeline.pipeline import Pipeline
from zbv_worker.run.options import RunOptions
from zbv_worker.run.run import train


class Node:
    def __init__(self) -> None:
        self.me = self


def garbage() -> weakref.ref[Node]:
    """An object that only a collection can free."""
    return weakref.ref(Node())


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    gc.unfreeze()  # the test run itself freezes its modules
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_garbage_is_freed_after_a_step_and_older_garbage_in_time() -> None:
    """What exists after the first step is not visited again."""
    with GarbageCollection() as collection:
        assert gc.get_freeze_count() == 0
        collection.step_done()
        assert gc.get_freeze_count() > 0
        node = Node()
        older = weakref.ref(node)
        for _ in range(3):
            found = garbage()
            assert not gc.isenabled()
            assert found() is not None
            collection.step_done()  # the node survives, and so becomes old
            assert found() is None
        del node
        for _ in range(100):
            collection.step_done()
        assert older() is None


def test_an_error_restores_everything() -> None:
    """The fixture compares."""

    def fail() -> None:
        with GarbageCollection() as collection:
            collection.step_done()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_of_two_runs_in_a_process_the_first_has_the_collections() -> None:
    with GarbageCollection() as first:
        with GarbageCollection() as second:
            second.step_done()
            assert gc.get_freeze_count() == 0
        assert not gc.isenabled()
        first.step_done()


def test_a_users_choice_is_left_alone() -> None:
    gc.disable()
    try:
        with GarbageCollection() as collection:
            collection.step_done()
            assert gc.get_freeze_count() == 0
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_training_collects_only_between_steps() -> None:
    runs = 0
    in_action: list[bool] = []

    class Observed(Remembering):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            in_action.append(gc.isenabled())
            return super().loss(output, target)

    def count(phase: str, info: object) -> None:
        nonlocal runs
        runs += phase == "start"

    orders = Orders.from_text([["0F0", "1F0", "1B0", "0B0"]])
    plan = RankPlan.of("plan", unit_problem(1, 1), orders, 0)
    gc.callbacks.append(count)
    try:
        train(RunOptions((), ModelSpec("tests:model"), 4), [plan], Observed(), ThreadHub(1).transport(0), CPU)
    finally:
        gc.callbacks.remove(count)
    assert in_action == [False] * 4
    assert runs >= 4


def test_a_pipeline_collects_nothing_within_a_step() -> None:
    """Whatever the user has set stays: collections go on in the code between two steps."""
    within: list[bool] = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            within.append(gc.isenabled())
            return super().forward(x)

    plan = zbv_solver.plan(unit_problem(1, 2), "quick")
    with Pipeline(plan, [Watching(2, 2), nn.Linear(2, 2)], nn.functional.mse_loss) as pipe:
        for is_on in (True, False, True):
            if not is_on:
                gc.disable()
            pipe.step(torch.ones(4, 2), torch.zeros(4, 2))
            assert gc.isenabled() == is_on
            gc.enable()
    assert within
    assert not any(within)
