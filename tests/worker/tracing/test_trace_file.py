"""Reports of long runs stay small, and a file has a rank's newest steps during the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import zbv_worker.tracing.report
from support.thread_transport import ThreadHub, ThreadTransport
from zbv_solver.plans.orders import Action
from zbv_worker.execution.timeline import Record, StepResult
from zbv_worker.host.state_files import trace_file
from zbv_worker.tracing.report import RankReport, StepLine, TraceFile
from zbv_worker.transport.world import Layout


def result(step: int, actions: int = 2) -> StepResult:
    at = 1_000 * step
    records = [Record(Action(0, "F", j), at + j, at + j + 1, at + j + 2, 64) for j in range(actions)]
    return StepResult(step, {}, tuple(records))


def report(*plans: str) -> RankReport:
    """One step per plan."""
    made = RankReport(plans[0], 0)
    for step, plan_id in enumerate(plans):
        made.add(StepLine(step, plan_id, 2.0 - step / 10, 0.5, 0.1), result(step))
    return made


def test_the_document_has_every_step_with_its_plan_and_its_actions() -> None:
    document = report("a", "b").document()
    assert [(step["step"], step["plan_id"], step["loss"]) for step in document["steps"]] == [
        (0, "a", 2.0),
        (1, "b", 1.9),
    ]
    assert document["steps"][1]["actions"] == [["0F0", 1000, 1001, 1002, 64], ["0F1", 1001, 1002, 1003, 64]]


def test_a_long_run_keeps_its_newest_records_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zbv_worker.tracing.report, "_KEPT_RECORDS", 7)
    made = report(*["a"] * 30)
    assert [found.step for found in made.newest()] == [27, 28, 29]  # of two actions each
    steps = made.document()["steps"]
    assert [step["step"] for step in steps] == list(range(30))
    assert [step["step"] for step in steps if step["actions"]] == [27, 28, 29]
    assert made.lines.maxlen is not None


def test_a_step_with_more_actions_than_are_kept_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zbv_worker.tracing.report, "_KEPT_RECORDS", 1)
    assert [found.step for found in report("a", "a", "a").newest()] == [2]


def test_the_newest_steps_are_those_of_one_plan() -> None:
    assert [found.step for found in report("a", "a", "b", "b", "b").newest()] == [2, 3, 4]
    assert [found.step for found in report("a", "a", "b", "b", "b").newest(2)] == [3, 4]


def test_the_newest_steps_are_written_to_a_file_with_the_ranks_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceFile(tmp_path, ThreadHub(1).transport(0), timeout=60.0)
    writer.update(RankReport("a", 0), is_last=True)
    writer.update(report(*["a"] * 4))
    assert not trace_file(tmp_path, 0).exists()  # no steps, or not after every fifth step
    made = report(*["a"] * 3, *["b"] * 7)
    writer.update(made)
    document = json.loads(trace_file(tmp_path, 0).read_text())
    about = {name: document[name] for name in ("rank", "pp_rank", "replica", "plan_id", "clock_offset_ns")}
    assert about == {"rank": 0, "pp_rank": 0, "replica": 0, "plan_id": "b", "clock_offset_ns": 0}
    assert [step["step"] for step in document["steps"]] == [5, 6, 7, 8, 9]
    assert document["steps"][-1]["actions"][0] == ["0F0", 9000, 9001, 9002, 64]
    assert document["steps"][-1]["loss"] == pytest.approx(1.1)

    for step in range(10, 15):
        made.add(StepLine(step, "b", math.nan, 0.5, 0.1), result(step))
    writer.update(made)  # too early
    assert json.loads(trace_file(tmp_path, 0).read_text()) == document
    monkeypatch.setattr(zbv_worker.tracing.report, "_MOST_ACTIONS", 5)
    writer.update(made, is_last=True)
    steps = json.loads(trace_file(tmp_path, 0).read_text())["steps"]
    assert [step["step"] for step in steps] == [13, 14]  # two of two actions fit into five
    assert [step["loss"] for step in steps] == [None, None]  # JSON has no NaN


def test_the_curve_has_all_steps_of_a_short_run_and_evenly_some_of_a_long_one(tmp_path: Path) -> None:
    writer = TraceFile(tmp_path, ThreadHub(1).transport(0), timeout=60.0)
    made = report(*["a"] * 3)
    writer.update(made, is_last=True)
    curve = json.loads(trace_file(tmp_path, 0).read_text())["curve"]
    assert curve == [[0, 0.5, 2.0], [1, 0.5, pytest.approx(1.9)], [2, 0.5, pytest.approx(1.8)]]

    resumed = RankReport("a", 0)
    for step in range(1001, 9000):
        resumed.add(StepLine(step, "a", math.inf if step == 2000 else float(step), 0.5, 0.1), result(step, 1))
        points = resumed.curve.points
        assert (points[0][0], points[-1][0]) == (1001, step)
        assert len(points) <= 513
    steps = [step for step, _, _ in points]
    assert steps[1:-1] == [*range(1008, 8999, 16)], "evenly, and the same on all ranks"
    assert {step: loss for step, _, loss in points}[2000] is None  # JSON has no infinity


def test_ranks_that_compute_a_replica_together_send_a_trace_each(tmp_path: Path) -> None:
    hub = ThreadHub(1)
    hub.layout = Layout(1, replicas=2, inner=2)

    def write(transport: ThreadTransport) -> int:
        TraceFile(tmp_path, transport, timeout=60.0).update(report("a"), is_last=True)
        return int(json.loads(trace_file(tmp_path, transport.rank).read_text())["replica"])

    assert hub.run(write) == [0, 1, 2, 3]
