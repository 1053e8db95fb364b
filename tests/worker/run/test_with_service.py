"""Ranks fetch their own lists from a service and train with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zbv_worker as zbv
from support.plans import random_plan
from torch import nn
from zbv_service.client import Client
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.stages import Copies
from zbv_solver.search.assemble import make_plan
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.pipeline import automatic_plan
from zbv_worker.tracing.report import read_reports, summarise

from examples.demo.local_service import LocalService, ServiceStartError

MODEL = {"layers": 4, "width": 16, "heads": 2, "length": 16, "sequences": 2, "characters": 20_000}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with LocalService(tmp_path_factory.mktemp("service"), port=0) as started:
        yield started


def test_each_rank_fetches_its_list_from_a_service_and_trains(service: LocalService, tmp_path: Path) -> None:
    problem, orders = random_plan()
    plan = make_plan(problem, orders, method="random")
    with Client(service.address) as client:
        assert client.import_plan(plan_json(plan)) == plan.plan_id
    for rank in range(2):
        fetched = PlanSource(service.address, plan.plan_id).rank_plan(rank, timeout=60)
        assert fetched == RankPlan.of(plan.plan_id, problem, plan.orders, rank)
    whole = PlanSource(service.address, plan.plan_id).whole(timeout=60)
    assert (whole.plan_id, whole.orders) == (plan.plan_id, plan.orders)
    assert whole.objective_value == pytest.approx(plan.metrics.span)
    with pytest.raises(InvalidRun, match="found rank 2; the plan has 2 ranks"):
        whole.of_rank(2)
    with pytest.raises(InvalidRun, match="no plan 00 from"):
        PlanSource(service.address, "00").whole(timeout=60)
    with pytest.raises(InvalidRun, match="rank 7: no action list"):
        PlanSource(service.address, plan.plan_id).rank_plan(7, timeout=60)
    with_copies = replace(problem, copies=Copies((1.0,) * 4, (1.0,) * 4, problem.memory.forward))
    lists = [["0F0", "0O0", "0D0", "0R0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    copied = make_plan(replace(with_copies, microbatches=1), Orders.from_text(lists), method="copied")
    with Client(service.address) as client:
        client.import_plan(plan_json(copied))
    copied.save(tmp_path / "copied.json")
    for source in (PlanSource(service.address, copied.plan_id), PlanSource(file=tmp_path / "copied.json")):
        listed = source.rank_plan(0, timeout=60)
        assert listed == RankPlan.of(copied.plan_id, copied.problem, copied.orders, 0)
        copies = [(place, str(action)) for place, action in listed.copies]
        assert copies == [(1, "0O0"), (1, "0D0"), (1, "0R0")]
    command = python_command(
        "zbv_worker",
        *("run", "--server", service.address, "--plan", plan.plan_id, "--steps", "2", "--threads", "1"),
        *("--model", "zbv_worker.models.gpt:gpt", "--model-args", json.dumps(MODEL)),
        *("--timeout", "120", "--pin", "--result-dir", str(tmp_path / "results")),
    )
    with LocalRanks([command] * 2, tmp_path / "logs") as ranks:
        ranks.wait(timeout=240)
    found = summarise(read_reports(tmp_path / "results", 2))
    assert found.plan_id == plan.plan_id
    assert len(found.losses) == 2


def test_the_service_plans_the_layers_of_a_pipeline_where_the_planner_is_not_installed(
    service: LocalService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(problem: object) -> None:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(automatic_plan, "_planned_here", missing)
    layers, x = [nn.Linear(4, 4) for _ in range(3)], torch.rand(8, 4)
    expected = nn.functional.mse_loss(nn.Sequential(*layers)(x), x).item()
    with zbv.Pipeline(
        None, layers, nn.functional.mse_loss, microbatches=2, example=(x[:4], x[:4]), service=service.address
    ) as pipe:
        assert pipe.step(x, x).item() == pytest.approx(expected, rel=1e-6)
    assert "planned 2 microbatches on 1 rank" in capsys.readouterr().err


def test_a_failing_service_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "zbv-service"
    script.write_text("#!/bin/sh\necho no database >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr("examples.demo.local_service._executable", lambda: str(script))
    with pytest.raises(ServiceStartError, match="no database"), LocalService(tmp_path, port=0):
        pass
