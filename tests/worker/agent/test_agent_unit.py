"""The agent's command: its systemd unit has options that it has, and it says when it can take no run."""

from __future__ import annotations

import configparser
import logging
import shlex
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_service.client.tokens import FILE_VARIABLE
from zbv_solver.commands.parser import Parser
from zbv_worker.agent.daemon import Agent
from zbv_worker.commands.agent import add_agent
from zbv_worker.commands.cli import main

UNIT = ROOT / "deploy" / "zbv-agent.service"


def test_the_unit_runs_the_agent_and_stops_it_gently() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    command, *arguments = shlex.split(service["ExecStart"])
    assert Path(command).name == "zbv-worker"
    assert arguments.pop() == "$ZBV_AGENT_OPTIONS"
    parser = Parser()
    add_agent(parser.add_subparsers())
    parsed = parser.parse_args(arguments)
    assert parsed.drain_seconds < float(service["TimeoutStopSec"])
    # The agent alone can read its token, and finds it.
    name, _, _ = service["LoadCredential"].partition(":")
    assert service["Environment"] == f"{FILE_VARIABLE}=%d/{name}"
    # With the default, every rank would get the SIGTERM that is meant for the agent.
    assert service["KillMode"] == "mixed"


def test_an_agent_that_allows_nothing_says_at_its_start_that_it_can_take_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(Agent, "run", lambda _agent: None)
    start = ["agent", "--server", "http://127.0.0.1:9", "--state-dir", str(tmp_path)]
    for allowed, warnings in (([], 1), (["--allow-model", "a.*"], 0), (["--allow-script", "/a.py"], 0)):
        caplog.clear()
        assert main([*start, *allowed]) == 0
        said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert [("--allow-model" in text, "--allow-script" in text) for text in said] == [
            (True, True)
        ] * warnings
