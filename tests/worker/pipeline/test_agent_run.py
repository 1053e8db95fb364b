"""What a pipeline reports to the agent that started its script, and when it reports nothing."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zbv_worker as zbv
from torch import nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan
from zbv_worker.host.environment import script_environment
from zbv_worker.host.state_files import progress_file, trace_file


def train(plan: Plan, steps: int, *, closes: bool) -> list[float]:
    pipe = zbv.Pipeline(plan, [nn.Linear(3, 3) for _ in range(2)], loss=nnf.mse_loss)
    losses = [float(pipe.step(torch.randn(4, 3), torch.randn(4, 3))) for _ in range(steps)]
    if closes:
        pipe.close()
    del pipe
    gc.collect()  # as at the end of the process
    assert not dist.is_initialized()
    return losses


@pytest.mark.parametrize("closes", [True, False])
def test_the_steps_of_the_runs_plan_are_reported_to_the_last(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    for name, value in script_environment("http://zbv", plan.plan_id, tmp_path).items():
        monkeypatch.setenv(name, value)
    losses = train(plan, 7, closes=closes)
    trace = json.loads(trace_file(tmp_path, 0).read_text())
    assert (trace["plan_id"], trace["rank"]) == (plan.plan_id, 0)
    assert [(step["step"], step["loss"]) for step in trace["steps"]] == [*enumerate(losses)][-5:]
    assert [action[0] for action in trace["steps"][0]["actions"]] == plan.orders.all_text()[0]
    assert json.loads(progress_file(tmp_path, 0).read_text())["step"] == 6


def test_other_plans_and_other_processes_report_nothing(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in script_environment("http://zbv", "f" * 64, tmp_path).items():
        monkeypatch.setenv(name, value)
    train(plan, 1, closes=True)
    monkeypatch.delenv("ZBV_RUN_FOLDER")
    monkeypatch.setenv("ZBV_PLAN", plan.plan_id)
    train(plan, 1, closes=True)
    assert [*tmp_path.iterdir()] == []


def test_a_plan_without_a_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBV_PLAN", "f" * 64)
    monkeypatch.delenv("ZBV_SERVER", raising=False)
    with pytest.raises(zbv.InvalidRun, match="found ZBV_PLAN without ZBV_SERVER"):
        zbv.run_plan()
