"""An agent writes heartbeats to a file, which a container's health check reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from zbv_worker.agent.heartbeat import FILE, STALE_SECONDS, AgentNotRunning, Heartbeat, alone_in, check
from zbv_worker.commands.cli import main
from zbv_worker.host.state_files import read_json

SERVER = "http://planner:8000"


def beat(folder: Path, *, answered: bool) -> float:
    """Write one heartbeat; returns its time."""
    Heartbeat(folder, "node-1", SERVER).write(answered=answered)
    at = read_json(folder / FILE)["at"]
    assert isinstance(at, float)
    return at


def test_an_agent_with_a_recent_heartbeat_is_running(tmp_path: Path) -> None:
    at = beat(tmp_path / "state", answered=True)
    said = check(tmp_path / "state", at + 3)
    assert said == f"agent node-1 is running; {SERVER} answered 3 s ago"


def test_an_agent_whose_service_is_away_is_running_too(tmp_path: Path) -> None:
    at = beat(tmp_path, answered=False)
    assert check(tmp_path, at) == f"agent node-1 is running; {SERVER} has not answered yet"


def test_an_agent_that_hangs_is_not_running(tmp_path: Path) -> None:
    at = beat(tmp_path, answered=True)
    check(tmp_path, at + STALE_SECONDS)
    with pytest.raises(AgentNotRunning, match="agent node-1 has been silent for 61 s"):
        check(tmp_path, at + STALE_SECONDS + 1)


def test_the_time_of_the_services_last_answer_is_kept(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, "node-1", SERVER)
    heartbeat.write(answered=True)
    before = read_json(tmp_path / FILE)
    heartbeat.write(answered=False)
    after = read_json(tmp_path / FILE)
    assert after["answered_at"] == before["answered_at"]
    assert after["at"] > before["at"]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"at": 1.0}'])
def test_no_agent_in_a_folder(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    assert main(["agent", "--check", "--state-dir", str(tmp_path)]) == 1
    assert f"found no trace of an agent in {tmp_path / FILE}" in capsys.readouterr().err


def test_the_command_reports_the_agents_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beat(tmp_path, answered=True)
    assert main(["agent", "--check", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("agent node-1 is running")


def test_an_unwritable_file_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file, where a folder should be")
    with caplog.at_level(logging.WARNING):
        Heartbeat(tmp_path / "state", "node-1", SERVER).write(answered=True)
        with alone_in(tmp_path / "state"):
            pass
    assert "cannot write" in caplog.text
    assert "cannot lock" in caplog.text


def test_two_agents_cannot_share_a_state_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["agent", "--server", SERVER, "--state-dir", str(tmp_path / "state")]
    with alone_in(tmp_path / "state"):
        assert main(start) == 2
    assert f"another agent uses {tmp_path / 'state'}" in capsys.readouterr().err
    with alone_in(tmp_path / "state"):
        pass  # the first agent has ended
