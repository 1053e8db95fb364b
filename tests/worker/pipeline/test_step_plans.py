"""The planner's process, and what callers of a pipeline with a plan for every step may do wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zbv_solver
import zbv_worker as zbv
from torch import nn
from zbv_solver.problem.writing import problem_json
from zbv_worker.pipeline.planner_client import PlannerClient
from zbv_worker.pipeline.step_plan import StepPlan, answer_of, key_of_values
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
PARENT = """
import json, sys, time
from zbv_worker.pipeline.planner_client import PlannerClient
print(PlannerClient(json.loads(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def shape_of(features: Any) -> torch.Tensor:
    return torch.empty(int(features["tokens"]), 2, device="meta")


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return ((output - target) ** 2).sum(), target.numel()


@pytest.fixture
def pipe() -> Iterator[zbv.Pipeline]:
    made = zbv.Pipeline(
        "per-step", [nn.Linear(2, 2), nn.Linear(2, 2)], loss_sum, problem=PROBLEM, shape_of=shape_of
    )
    with suppress(zbv.WorkerError), made:
        yield made


def batch(*tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(each, 2), torch.ones(each, 2)) for each in tokens]


def process_of(pipe: zbv.Pipeline) -> PlannerClient:
    assert pipe._own.plans is not None
    assert pipe._own.plans._client is not None
    return pipe._own.plans._client


def wait_until_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_plan_travels_as_json() -> None:
    problem = zbv_solver.parse(PROBLEM)
    assert isinstance(problem, zbv_solver.Problem)
    plan = zbv_solver.StepPlanner(problem).first({"tokens": [1, 2, 3]})
    found = StepPlan.of(json.loads(json.dumps(answer_of(plan, 0.0))))
    assert found.decoded().all_text() == plan.orders.all_text()
    assert found.plan_id == plan.plan_id
    assert not found.is_searched


def test_equal_values_have_equal_keys() -> None:
    key = key_of_values({"a": [1, 2], "b": [3, 4]})
    assert key == key_of_values({"b": [3.0, 4.0], "a": [1.0, 2.0]})
    assert key != key_of_values({"a": [2, 1], "b": [3, 4]})


def test_the_process_ends_when_its_rank_is_killed() -> None:
    problem = zbv_solver.parse(PROBLEM)
    assert isinstance(problem, zbv_solver.Problem)
    command = [sys.executable, "-c", PARENT, json.dumps(problem_json(problem))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        os.kill(pid, 0)
        rank.send_signal(signal.SIGKILL)
    assert wait_until_gone(pid)


def test_a_step_that_nobody_announced_is_counted(pipe: zbv.Pipeline) -> None:
    before = pipe.plan_id
    loss = pipe.step(microbatches=batch(3, 7, 2), features={"tokens": [3, 7, 2]})
    assert loss is not None
    assert pipe.plan_id != before
    assert pipe.planning is not None
    assert (pipe.planning.constructed, pipe.planning.late, pipe.planning.waited) == (1, 0, 0)
    pid = process_of(pipe).pid
    pipe.close()
    assert wait_until_gone(pid)


def test_an_announced_step_gets_the_plan_of_a_search(pipe: zbv.Pipeline) -> None:
    pipe.announce(features={"tokens": [3, 7, 2]})
    client = process_of(pipe)
    for _ in range(600):
        assert pipe._own.plans is not None
        pipe._own.plans._take_answers()
        if any(plan is not None and plan.is_searched for plan in pipe._own.plans._announced.values()):
            break
        time.sleep(0.05)
    pipe.step(microbatches=batch(3, 7, 2), features={"tokens": [3, 7, 2]})
    assert pipe.planning is not None
    assert pipe.planning.planned == 1
    assert pipe.planning.planning_seconds > 0
    assert client.is_alive


def test_a_pipeline_that_is_dropped_leaves_no_process() -> None:
    made = zbv.Pipeline("per-step", [nn.Linear(2, 2), nn.Linear(2, 2)], loss_sum, problem=PROBLEM)
    pid = process_of(made).pid
    del made
    assert wait_until_gone(pid)


def test_a_step_evaluates_with_the_newest_plan(pipe: zbv.Pipeline) -> None:
    assert pipe.evaluate(microbatches=batch(1, 1, 1)) is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": [1, 2]}, "for every one of the 3 microbatches"),
        ({"token": [1, 2, 3]}, "must be tokens"),
        ({"tokens": [1, 2, 30]}, "memory.limit"),
        ({"tokens": [1, 2, -3]}, "found"),
        (None, "Pass cu_seqlens= and sequences=, or features="),
    ],
)
def test_wrong_features_are_refused(pipe: zbv.Pipeline, given: Any, message: str) -> None:
    with pytest.raises(zbv.InvalidRun, match=message):
        pipe.step(microbatches=batch(1, 2, 3), features=given)
    assert wait_until_gone(process_of(pipe).pid)


def test_an_announcement_without_features_is_refused(pipe: zbv.Pipeline) -> None:
    with pytest.raises(zbv.InvalidRun, match="found no features"):
        pipe.announce()
    pipe.announce(features={"tokens": [1, 2, 30]})  # does not fit: found out when the step begins
    pipe.step(microbatches=batch(1, 2, 3), features={"tokens": [1, 2, 3]})


def test_a_pipeline_with_one_plan_announces_nothing() -> None:
    plan = zbv_solver.plan(zbv_solver.parse(PROBLEM), "quick")
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with zbv.Pipeline(plan, layers, loss_sum) as pipe:
        assert pipe.planning is None
        with pytest.raises(zbv.InvalidRun, match="one plan for all steps"):
            pipe.announce(features={"tokens": [1, 2, 3]})
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
