"""What a rank of an agent reports about its run or its script, and gets for them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import zbv_worker as zbv
from zbv_solver.plans.orders import Action
from zbv_worker.agent.rank import _options, run_script
from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.errors import (
    ChannelTimeout,
    Disagreement,
    InvalidRun,
    PeerLost,
    StorageFailed,
    Superseded,
    WorkerError,
)
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.failures.progress import CurrentProgress, Progress, attach_progress, failure_of
from zbv_worker.host.state_files import failure_file, progress_file
from zbv_worker.stage.program import Program


class At(CurrentProgress):
    """A rank in step 7."""

    def read(self) -> Progress:
        return Progress(7, "2I1", 3)


def failure(error: Exception, at: CurrentProgress) -> tuple[object, ...]:
    found = failure_of(4, error, "what happened", at.read())
    assert found["detail"] == "what happened"
    return tuple(found[name] for name in ("kind", "rank", "step", "action", "peer"))


def test_an_error_in_an_action_has_its_step_action_and_peer() -> None:
    error = ChannelTimeout("x")
    attach_progress(error, Progress(6, str(Action(2, "I", 1)), 5))
    assert failure(error, At()) == ("peer", 4, 6, str(Action(2, "I", 1)), 5)


def test_an_error_between_actions_has_only_a_step() -> None:
    assert failure(RuntimeError("x"), At()) == ("error", 4, 7, None, None)
    assert failure(RuntimeError("x"), CurrentProgress()) == ("error", 4, None, None, None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLost("x"), "peer"),
        (InvalidRun("x"), "invalid"),
        (Disagreement("x"), "invalid"),
        (Superseded("x"), "invalid"),
        (StorageFailed("x"), "error"),
        (WorkerError("x"), "error"),
    ],
)
def test_repeatable_errors_are_distinguished_from_those_of_a_peer(error: Exception, kind: str) -> None:
    assert failure(error, CurrentProgress())[0] == kind


def work(**options: object) -> dict[str, Any]:
    """The order of a service, with the options that every service sends."""
    sent = {
        "backend": "gloo", "timeout": 9.0, "threads": 1, "data_parallel": 2, "shard": False, "accumulate": 1,
        "precision": "bfloat16", "clip_norm": None, "evaluate_every": None, "compile": False,
        "checkpoint": None, "startup_timeout": 5.0, "main_gradients": True, "non_finite": "fail",
    }  # fmt: skip
    model = {"factory": "a.b:c", "arguments": {}, "seed": 0}
    order = {"plan_id": "0" * 64, "model": model, "steps": 3, "run_id": "r", "generation": 2}
    work = {**order, "options": sent | options}
    return {"server": "http://planner", "allowed_models": ["a.*"], "work": work}


def test_the_options_of_a_run_reach_its_training(tmp_path: Path) -> None:
    checkpoint = {"directory": "/shared", "every": 5, "timeout": 60.0, "sync": True}
    options = {"startup_timeout": 77.0, "compile": True, "main_gradients": False, "accumulate": 4}
    found = _options(work(**options, checkpoint=checkpoint, non_finite="skip"), tmp_path)
    assert (found.training.parts, found.training.non_finite) == (4, "skip")
    assert (found.timeout, found.startup_timeout) == (9.0, 77.0)
    assert found.training.program == Program("bfloat16", is_compiled=True, has_main_gradients=False)
    assert found.training.checkpoint == CheckpointOptions(
        Path("/shared"), 5, timeout=60.0, is_synchronous=True, run="r", attempt=2
    )


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script of some text as rank 3; returns the exit status and the failure for the agent."""
    for name in ("ZBV_SERVER", "ZBV_PLAN", "ZBV_RUN_FOLDER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour.py").write_text("VALUE = 5")

    def run(text: str, threads: int | None = None) -> tuple[int, Any]:
        path = tmp_path / "train.py"
        path.write_text(text)
        script = {"path": str(path), "arguments": ["--lr", "1"]}
        work = {"script": script, "plan_id": "p" * 64, "options": {"threads": threads}}
        status = run_script({"server": "http://zbv", "work": work}, tmp_path)
        failure = failure_file(tmp_path, 3)
        return status, json.loads(failure.read_text()) if failure.exists() else None

    return run


def test_a_script_has_arguments_variables_and_its_neighbours(
    running: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import os, sys, neighbour\nprint(__name__, sys.argv[1:], neighbour.VALUE, os.environ['ZBV_PLAN'])"
    assert running(text, threads=2) == (0, None)
    assert capsys.readouterr().out == f"__main__ ['--lr', '1'] 5 {'p' * 64}\n"
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["ZBV_RUN_FOLDER"] == str(tmp_path)
    assert json.loads(progress_file(tmp_path, 3).read_text()) == {"rank": 3, "step": None, "action": None}
    assert zbv.run_plan("other") == PlanSource("http://zbv", "p" * 64)


def test_outside_of_a_run_there_is_another_plan(running: Any) -> None:
    assert zbv.run_plan() is None
    assert zbv.run_plan("plan.json") == "plan.json"


@pytest.mark.parametrize(
    ("text", "status", "kind", "detail"),
    [
        ("x = 1\nraise ValueError('no data')", 1, "error", "train.py: ValueError: no data (train.py:2)"),
        ("import sys; sys.exit(7)", 7, "error", "train.py ended with exit status 7"),
        ("raise SystemExit('no data')", 1, "error", "train.py ended with exit status 1"),
        ("import argparse; argparse.ArgumentParser().parse_args()", 2, "invalid", "exit status 2"),
        ("import zbv_worker as zbv; raise zbv.InvalidRun('no such plan.')", 2, "invalid", "no such plan."),
        ("import zbv_worker as zbv; raise zbv.PeerLost('rank 0 lost.')", 1, "peer", "rank 0 lost."),
        ("def f(:", 1, "error", "train.py: SyntaxError: "),
    ],
)
def test_the_agent_hears_why_it_failed(running: Any, text: str, status: int, kind: str, detail: str) -> None:
    found, failure = running(text)
    assert (found, failure["kind"], failure["rank"]) == (status, kind, 3)
    assert detail in failure["detail"]
    assert ("is_in_log" in failure) == ("exit status" in detail)


def test_a_script_that_ends_with_status_0_has_not_failed(running: Any) -> None:
    assert running("import sys; sys.exit()") == (0, None)
