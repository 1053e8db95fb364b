"""The report on a node's GPUs: its arithmetic, and all but the devices on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from zbv_solver.plans.orders import Action
from zbv_solver.problem.placement import Placement
from zbv_solver.verify.verifier import verify_orders
from zbv_worker.commands.cli import main
from zbv_worker.execution.executor import StepResult
from zbv_worker.execution.timeline import Record
from zbv_worker.measure.gpu_report.gpu_report import overlaps
from zbv_worker.measure.gpu_report.rank import v_orders
from zbv_worker.measure.profile.profile import LinkProfile
from zbv_worker.measure.ranks import equal_stages
from zbv_worker.tracing.merged_trace import RankTrace

GPT = {"layers": 4, "width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
US = 1000
LINKS = {(0, 1): LinkProfile(0, 1, (), latency=10e-6, bandwidth=1e9)}


def received(wait: int, start: int) -> list[RankTrace]:
    """Stage 0's F of rank 0 ends at 100 us; stage 1's on rank 1 receives 10,000 bytes: 20 us."""
    sent = Record(Action(0, "F", 0), 0, 0, 100 * US)
    received = Record(Action(1, "F", 0), wait * US, start * US, 200 * US, 10_000)
    return [
        RankTrace.of("plan", rank, [StepResult(0, {}, (record,))])
        for rank, record in enumerate((sent, received))
    ]


@pytest.mark.parametrize(
    ("wait", "start", "exposed", "hidden"),
    [
        (150, 150, 0, 1.0),  # busy until after the arrival
        (110, 120, 10, 0.5),  # waits for the last 10 of 20 us
        (50, 120, 20, 0.0),  # waits 50 us for the sender, then for the whole transfer
        (50, 140, 40, 0.0),  # a slow transfer: waits for all 40 us
    ],
)
def test_a_transfer_is_exposed_where_its_receiver_waits_after_it_was_sent(
    wait: int, start: int, exposed: int, hidden: float
) -> None:
    (found,) = overlaps(received(wait, start), LINKS)
    assert (found.stage, found.count) == (1, 1)
    assert found.exposed * 1e6 == pytest.approx(exposed)
    assert found.hidden == pytest.approx(hidden)


@pytest.mark.parametrize(("p", "microbatches"), [(2, 1), (2, 8), (3, 5), (4, 8)])
def test_the_reports_own_plan_is_valid_and_splits_every_backward(p: int, microbatches: int) -> None:
    problem = equal_stages(Placement.of("v", p), microbatches)
    orders = v_orders(problem)
    verify_orders(problem, orders)
    assert len(orders) == 3 * problem.n_stages * microbatches


def test_all_but_the_devices_is_reported_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    small = ["--model-args", json.dumps(GPT), "--repeats", "2", "--microbatches", "3"]
    assert main(["gpu-report", "--device", "cpu", *small, "-o", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["gradients"]["right"]
    assert report["gradients"]["relative_error"] <= report["gradients"]["tolerance"]
    assert [entry["stage"] for entry in report["overlap"]] == [0, 1, 2, 3]
    assert all(entry["count"] == 3 for entry in report["overlap"])
    assert all(0 <= entry["hidden"] <= 1 for entry in report["overlap"])
    assert [entry["ratio"] > 0 for entry in report["split"]] == [True] * 4
    said = capsys.readouterr().out
    assert "compared with one process: correct" in said


def test_without_a_gpu_the_error_says_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "report.json"
    assert main(["gpu-report", "-o", str(path)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "found no CUDA GPU" in line
    assert "at least one, its driver, and a torch built for CUDA" in line
    assert not path.exists()


def test_a_report_of_one_rank_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-report", "--ranks", "1", "-o", str(tmp_path / "r.json")]) == 2
    assert "must be at least 2" in capsys.readouterr().err
