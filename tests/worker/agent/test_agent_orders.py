"""What the daemon of an agent does with orders, and how a unit of systemd starts and stops it."""

from __future__ import annotations

import configparser
import logging
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.paths import ROOT
from zbv_service.client import HeartbeatReply, NodeWork
from zbv_service.client.tokens import FILE_VARIABLE
from zbv_solver.commands.parser import Parser
from zbv_worker.agent.daemon import Agent
from zbv_worker.agent.policy import AgentOptions
from zbv_worker.commands.agent import add_agent
from zbv_worker.commands.cli import main


class Recorder:
    """Stands for an agent's generation and its sync, and records the calls."""

    def __init__(self, node_rank: int = 0):
        self.work = SimpleNamespace(run_id="r", node_rank=node_rank)
        self.stops: list[bool] = []
        self.plans: list[str | None] = []

    def progress(self) -> list[Any]:
        return []

    def stop(self, *, failed_elsewhere: bool) -> None:
        self.stops.append(failed_elsewhere)

    def fetch_plan(self, plan_id: str | None) -> None:
        self.plans.append(plan_id)


def beat(answer: HeartbeatReply, recorder: Recorder, folder: Path) -> Recorder:
    agent = Agent(AgentOptions("http://zbv", "n", "127.0.0.1", 1, folder))
    agent._client = cast(Any, SimpleNamespace(heartbeat=lambda *_: answer))
    agent._beat(cast(Any, recorder), cast(Any, recorder))
    return recorder


@pytest.mark.parametrize(
    ("cause", "failed_elsewhere"), [("cancelled", False), ("failed", True), ("unknown-run", True)]
)
def test_only_after_a_failure_may_ranks_report(tmp_path: Path, cause: str, failed_elsewhere: bool) -> None:
    # The reason is for people; only the cause counts.
    recorder = beat(HeartbeatReply(True, cause, "the run was cancelled"), Recorder(), tmp_path)
    assert (recorder.stops, recorder.plans) == ([failed_elsewhere], [])


@pytest.mark.parametrize(
    ("models", "directories", "said"),
    [
        ((), ("/shared",), "does not load model a.b:c: it allows none. Start it with --allow-model 'a.b'"),
        (("b.*",), ("/shared",), "does not load model a.b:c: it allows b.*"),
        (("a.*",), ("/other",), "does not keep checkpoints in /shared/run: it allows /other"),
    ],
)
def test_disallowed_work_is_refused_and_nothing_is_prepared(
    tmp_path: Path, models: tuple[str, ...], directories: tuple[str, ...], said: str
) -> None:
    allowed = tuple(map(Path, directories))
    agent = Agent(AgentOptions("http://zbv", "n", "127.0.0.1", 1, tmp_path, models, allowed))
    reports: list[dict[str, Any]] = []
    agent._client = cast(Any, SimpleNamespace(report_end=lambda _, body: reports.append(body)))
    document = {"options": {"checkpoint": {"directory": "/shared/run", "every": 1}}}
    agent._carry_out(NodeWork("r" * 32, 2, 0, 1, 1, "h:1", "p", "a.b:c", document))
    (report,) = reports
    assert (report["run_id"], report["generation"], report["outcome"]) == ("r" * 32, 2, "failed")
    (failure,) = report["failures"]
    assert (failure["kind"], failure["rank"]) == ("refused", None)
    assert failure["detail"].startswith(f"agent n {said}")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "a folder was created"


@pytest.mark.parametrize(("node_rank", "plans"), [(0, ["p"]), (1, [])])
def test_the_first_node_fetches_the_next_plan(tmp_path: Path, node_rank: int, plans: list[str]) -> None:
    recorder = beat(HeartbeatReply(False, plan_id="p"), Recorder(node_rank), tmp_path)
    assert (recorder.stops, recorder.plans) == ([], plans)


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
