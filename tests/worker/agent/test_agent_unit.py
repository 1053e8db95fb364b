"""The systemd unit starts the agent with options that it has, and leaves its ranks time to finish."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

from support.paths import ROOT
from zbv_service.client.tokens import FILE_VARIABLE
from zbv_solver.commands.parser import Parser
from zbv_worker.commands.agent import add_agent

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
