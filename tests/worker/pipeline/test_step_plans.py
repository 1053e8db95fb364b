"""What callers of a pipeline with a plan for every step may give, and do wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import zbv_solver
import zbv_worker as zbv
from torch import nn
from zbv_worker.pipeline.step_plans import StepPlans

COSTS = ("forward", "backward_input", "backward_weight")
PROBLEM: dict[str, Any] = {
    "pp_degree": 1,
    "microbatches": 3,
    "features": {"tokens": [4, 5, 6]},
    "costs": {name: {"tokens": 1} for name in COSTS},
    "memory": {
        "forward": {"tokens": 2},
        "backward_input": {"tokens": -1},
        "backward_weight": {"tokens": -1},
        "limit": 40,
    },
}


def shape_of(features: Any) -> torch.Tensor:
    return torch.empty(int(features["tokens"]), 2, device="meta")


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return ((output - target) ** 2).sum(), target.numel()


@pytest.fixture
def pipe() -> Iterator[zbv.Pipeline]:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    made = zbv.Pipeline("per-step", layers, loss_sum, problem=PROBLEM, shape_of=shape_of)
    with suppress(zbv.WorkerError), made:
        yield made


def batch(*tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(each, 2), torch.ones(each, 2)) for each in tokens]


def plan_of(*tokens: int, **changes: Any) -> zbv_solver.Plan:
    problem = zbv_solver.parse({**PROBLEM, **changes})
    assert isinstance(problem, zbv_solver.Problem)
    return zbv_solver.StepPlanner(problem).plan({"tokens": tokens}, seconds=0.01)


def test_a_step_without_a_plan_gets_one_for_its_features(pipe: zbv.Pipeline) -> None:
    before = pipe.plan_id
    assert pipe.step(microbatches=batch(3, 7, 2), features={"tokens": [3, 7, 2]}) is not None
    assert pipe.plan_id != before


def test_a_step_runs_the_plan_that_it_is_given(pipe: zbv.Pipeline) -> None:
    plan = plan_of(3, 7, 2)
    pipe.step(microbatches=batch(3, 7, 2), plan=plan)
    assert pipe.plan_id == plan.plan_id


def test_a_step_evaluates_with_the_newest_plan(pipe: zbv.Pipeline) -> None:
    assert pipe.evaluate(microbatches=batch(1, 1, 1)) is not None


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: plan_of(3, 2, 7), "for other microbatches than this step's"),
        (lambda: plan_of(3, 7, 2, costs={name: {"tokens": 2} for name in COSTS}), "of another problem"),
        (lambda: plan_of(3, 7, 2, objective="makespan"), "of another problem"),
    ],
)
def test_a_plan_of_another_step_is_refused(pipe: zbv.Pipeline, plan: Any, message: str) -> None:
    with pytest.raises(zbv.InvalidRun, match=message):
        pipe.step(microbatches=batch(3, 7, 2), features={"tokens": [3, 7, 2]}, plan=plan())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": [1, 2]}, "for every one of the 3 microbatches"),
        ({"token": [1, 2, 3]}, "must be tokens"),
        ({"tokens": [1, 2, 30]}, "memory.limit"),
        ({"tokens": [1, 2, -3]}, "found"),
        (None, "Pass plan=, cu_seqlens= and sequences=, or features="),
    ],
)
def test_wrong_features_are_refused(pipe: zbv.Pipeline, given: Any, message: str) -> None:
    with pytest.raises(zbv.InvalidRun, match=message):
        pipe.step(microbatches=batch(1, 2, 3), features=given)


def test_a_pipeline_with_one_plan_takes_no_other() -> None:
    plan = zbv_solver.plan(zbv_solver.parse(PROBLEM), "quick")
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with (
        zbv.Pipeline(plan, layers, loss_sum) as pipe,
        pytest.raises(zbv.InvalidRun, match="one plan for all"),
    ):
        pipe.step(microbatches=batch(3, 7, 2), plan=plan)
    with pytest.raises(zbv.InvalidRun, match="found problem= with a plan"):
        zbv.Pipeline(plan, layers, loss_sum, problem=PROBLEM)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (None, "needs problem="),
        ({**PROBLEM, "features": {"tokens": [4, 5]}}, "features"),
        ({"pp_degree": 1, "microbatches": 3, "costs": dict.fromkeys(COSTS, 1)}, "/features"),
        ("absent.json", "absent.json"),
        ({**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}, "memory.limit"),
    ],
)
def test_wrong_problems_are_refused(problem: Any, message: str) -> None:
    with pytest.raises(zbv.InvalidRun, match=message):
        StepPlans(problem)
