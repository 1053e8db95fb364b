"""One generation on a node: failures of ranks that cannot report them, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes import DEADLINE, is_alive, wait_until
from zbv_service.client import NodeWork
from zbv_worker.agent import generation as generation_module
from zbv_worker.agent.generation import Generation
from zbv_worker.agent.heartbeat import Pulse
from zbv_worker.agent.policy import AgentOptions
from zbv_worker.failures.liveness import ABANDONED
from zbv_worker.host.state_files import PULSE

WORK = NodeWork("r", 0, 1, 2, 2, "127.0.0.1:1", "p", "a:b", {})
"""Node 1 of two with two ranks each: ranks 2 and 3."""


@pytest.fixture
def launching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a generation whose launcher is a shell script, run in the generation's folder."""

    def launch(script: str, patience: float = 60.0, **files: Any) -> Generation:
        folder = tmp_path / WORK.run_id / "0"
        folder.mkdir(parents=True)
        for name, document in files.items():
            (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(document))
        command = ["sh", "-c", f"cd {folder}; {script}"]
        monkeypatch.setattr(generation_module, "python_command", lambda *_: command)
        return Generation(WORK, AgentOptions("http://zbv", "n", "127.0.0.1", 4, tmp_path), patience)

    return launch


def ended(generation: Generation) -> Any:
    wait_until(generation.poll, "the generation ends")
    return generation.end()


def outcome_of(**failed: int) -> str:
    return f"echo '{json.dumps({'failed': failed})}' > outcome.json; exit 1"


def test_success_has_no_failures(launching: Any) -> None:
    assert ended(launching("exit 0")).outcome == "succeeded"


def test_a_killed_rank_is_named_with_its_signal_and_progress(launching: Any) -> None:
    end = ended(launching(outcome_of(**{"3": -9}), progress_3={"rank": 3, "step": 5, "action": "2I1"}))
    (failure,) = end.failures
    assert (end.outcome, failure["kind"], failure["rank"]) == ("failed", "killed", 3)
    assert (failure["step"], failure["action"]) == (5, "2I1")
    assert failure["detail"].startswith("rank 3 was killed by SIGKILL; it last reported step 5 at 2I1.")


def test_a_ranks_own_report_counts_more_than_its_status(launching: Any) -> None:
    report = {"kind": "peer", "rank": 2, "detail": "x" * 9000 + "\0"}
    end = ended(launching(outcome_of(**{"2": 1, "3": 4}), failure_2=report))
    assert [failure["kind"] for failure in end.failures] == ["peer", "error"]
    assert len(end.failures[0]["detail"]) == 4000
    assert end.failures[1]["detail"].startswith("rank 3 ended with status 4; it reported no step.")


def test_a_failure_whose_reason_is_in_the_log_has_the_end_of_the_log(launching: Any) -> None:
    write = (
        "mkdir -p logs/a/attempt_0/0 logs/a/attempt_0/1; cd logs/a/attempt_0; for i in $(seq 99); do echo "
        "line $i; done > 0/stdout.log; echo 'train.py: no such flag' > 0/stderr.log; "
        "echo killed > 1/stderr.log; cd ../../..; "
    )
    said = {"kind": "invalid", "rank": 2, "detail": "rank 2: train.py ended with exit status 2"}
    silent = write + outcome_of(**{"2": 2, "3": -9})
    script, other = ended(launching(silent, failure_2=said | {"is_in_log": True})).failures
    first, *_, last = script["detail"].splitlines()
    assert first == "rank 2: train.py ended with exit status 2: train.py: no such flag"
    assert last == "train.py: no such flag"
    assert ("line 99" in script["detail"], "line 50" in script["detail"]) == (True, False)
    assert "is_in_log" not in script
    assert other["detail"].endswith("Its log ends:\nkilled")


def test_ranks_that_the_launcher_ended_after_a_failure_are_no_cause(launching: Any) -> None:
    (failure,) = ended(launching(outcome_of(**{"2": -15, "3": 1}))).failures
    assert failure["rank"] == 3


def test_ranks_that_somebody_ended_are_named(launching: Any) -> None:
    (failure,) = ended(launching(outcome_of(**{"2": -15}))).failures
    assert "rank 2 was killed by SIGTERM" in failure["detail"]


def test_a_launcher_that_fails_shows_its_log(launching: Any) -> None:
    (failure,) = ended(launching("echo no such port; exit 3")).failures
    assert failure["kind"] == "launch"
    assert "status 3" in failure["detail"]
    assert failure["detail"].endswith("no such port")


def test_a_stopped_generation_has_not_failed(launching: Any) -> None:
    generation = launching("exec sleep 60")
    generation.stop(failed_elsewhere=False)
    assert ended(generation).outcome == "stopped"


def test_a_launcher_that_ignores_signals_is_killed(launching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "_GRACE_SECONDS", 0.2)
    generation = launching("trap '' TERM; touch ready; while true; do sleep 0.05; done")
    wait_until((generation.folder / "ready").exists, "the launcher ignores signals")
    generation.stop(failed_elsewhere=False)
    assert ended(generation).outcome == "stopped"


def test_after_a_failure_elsewhere_a_launcher_that_hangs_is_killed_without_the_grace(
    launching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_module, "_REPORT_SECONDS", 0.1)
    monkeypatch.setattr(generation_module, "_GRACE_SECONDS", 3600.0)
    generation = launching("trap '' TERM; while true; do sleep 0.05; done")
    generation.stop(failed_elsewhere=True)
    assert ended(generation).outcome == "stopped"


def test_an_agent_that_was_silent_for_too_long_ends_its_ranks_and_says_why(launching: Any) -> None:
    generation = launching("exec sleep 600", patience=5.0)
    generation._pulse._at -= 6.0
    end = ended(generation)
    (failure,) = end.failures
    assert (end.outcome, failure["kind"]) == ("failed", "agent-lost")
    assert "was stopped, or its host hung, for" in failure["detail"]
    assert "the service gives a run to other agents after 5 s" in failure["detail"]
    generation.kill()


def test_a_node_may_report_its_failure_first(launching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "_REPORT_SECONDS", DEADLINE)
    generation = launching("sleep 0.5; " + outcome_of(**{"2": -9}))
    generation.stop(failed_elsewhere=True)
    assert ended(generation).outcome == "failed"


def test_a_rank_ends_when_its_agent_is_stopped_and_not_before(tmp_path: Path) -> None:
    """This process plays the agent: it stops its pulse."""
    rank = (
        "import pathlib, sys, time; from zbv_worker.failures.liveness import AgentWatch, Liveness; "
        "folder = pathlib.Path(sys.argv[1]); "
        "watch = AgentWatch(folder, 60.0, lambda silent: (folder / 'said').write_text(str(silent))); "
        "Liveness().add(watch.look); "
        "(folder / 'ready').touch(); time.sleep(600)"
    )
    pulse = Pulse(tmp_path, DEADLINE, lambda _: None)
    pulse.start()
    process = subprocess.Popen([sys.executable, "-c", rank, str(tmp_path)])
    try:
        wait_until((tmp_path / "ready").exists, "the rank watches its agent")
        first = (tmp_path / PULSE).read_text()
        wait_until(lambda: (tmp_path / PULSE).read_text() != first, "the agent's pulse goes on")
        time.sleep(1)
        assert process.poll() is None
        pulse.stop()
        pulse._at -= 70.0
        pulse._write()
        assert process.wait(timeout=DEADLINE) == ABANDONED
    finally:
        process.kill()
        pulse.stop()
    assert float((tmp_path / "said").read_text()) > 60.0


def test_a_child_dies_with_its_parent_even_when_it_is_stopped(tmp_path: Path) -> None:
    child = (
        "import os, pathlib, time; from zbv_worker.host.process import end_with_parent; end_with_parent(); "
        "pathlib.Path('pid.part').write_text(str(os.getpid())); os.replace('pid.part', 'pid'); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    wait_until((tmp_path / "pid").exists, "the child runs")
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait(timeout=DEADLINE)
    wait_until(lambda: not is_alive(pid), "the child dies")
