"""A user's script as a rank: its arguments and variables, and what the agent learns if it fails."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import zbv_worker as zbv
from zbv_worker.agent.rank import run_script
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.host.state_files import failure_file, progress_file


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
def test_the_agent_learns_why_a_script_failed(
    running: Any, text: str, status: int, kind: str, detail: str
) -> None:
    found, failure = running(text)
    assert (found, failure["kind"], failure["rank"]) == (status, kind, 3)
    assert detail in failure["detail"]
    assert ("is_in_log" in failure) == ("exit status" in detail)


def test_a_script_that_ends_with_status_0_has_not_failed(running: Any) -> None:
    assert running("import sys; sys.exit()") == (0, None)
