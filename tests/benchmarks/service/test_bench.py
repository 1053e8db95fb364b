"""``python -m benchmarks service`` counts and judges correctly. No test asserts a time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import fake_searches
from support.fake_kinds import kinds
from support.live import Live, listening
from zbv_service.app import create_app
from zbv_service.settings import Settings

from benchmarks.cli import main
from benchmarks.service import agents, served
from benchmarks.service.load import get, offer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    database = f"sqlite:///{tmp_path_factory.mktemp('bench')}/zbv.db"
    settings = Settings(auth="none", database=database, searches=1, agent_timeout_seconds=3600.0)
    with listening(create_app(settings, kinds=kinds(fake_searches.immediate))) as found:
        yield found


def test_a_load_counts_every_response(live: Live) -> None:
    requests = [get(live.address, path) for path in ("/healthz", "/v1/searches/x", "/static/zbv.css")]
    load = asyncio.run(offer(live.address, requests, connections=3, seconds=0.3, rate=40))
    assert set(load.statuses) == {200, 404}
    assert len(load.latencies) == sum(load.statuses.values()) == 12
    assert load.rate == len(load.latencies) / load.seconds > 0


def test_an_offered_load_has_a_fixed_rate_and_latencies_count_from_the_due_time(live: Live) -> None:
    load = asyncio.run(offer(live.address, [get(live.address, "/healthz")], 4, seconds=0.5, rate=40))
    assert load.statuses == {200: 20}
    assert load.seconds >= 19 / 40
    slow = asyncio.run(offer(live.address, [get(live.address, "/healthz")], 1, seconds=1e-3, rate=50_000))
    assert max(slow.latencies) >= slow.seconds / 2  # the last one was due at once


def test_the_command_measures_a_new_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBV_DATABASE", f"sqlite:///{tmp_path}/mine.db")
    monkeypatch.setenv("ZBV_TOKEN", "of-another-service")
    output = tmp_path / "found.json"
    size = ["--seconds", "0.3", "--connections", "2", "--offered", "20"]
    status = main(["service", "ranks", *size, "-o", str(output)])
    rows = json.loads(output.read_text())["ranks"]["findings"]
    found = {row["what"]: row["value"] for row in rows}
    assert found["responses other than 200"] == 0
    assert found["rank plans, 2 connections, 20/s offered"] > 0
    assert status == int(any(row["missed_by"] > 0 for row in rows))
    assert "Rank plans fetched" in capsys.readouterr().out
    assert not (tmp_path / "mine.db").exists()
    assert os.environ["ZBV_TOKEN"] == "of-another-service"


@pytest.mark.parametrize(
    "flags", [["--connections", "0"], ["--seconds", "nan"], ["--searches", "-1"], ["--offered", "x"]]
)
def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["service", "ranks", *flags])
    assert f"found '{flags[1]}'" in capsys.readouterr().err


def test_the_log_of_a_service_that_does_not_start_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no reason')"))
    assert main(["service", "queue"]) == 1
    assert "the service did not start; its log:\nno reason" in capsys.readouterr().err


class InThisProcess:
    """A service that the benchmark would have started."""

    token = None

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def cpu_seconds(self) -> float:
        return time.process_time()


def test_heartbeats_of_a_run_are_measured_and_no_agent_is_lost(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    @contextmanager
    def serving(*options: str) -> Iterator[InThisProcess]:
        started.append(options)
        yield InThisProcess(live.address)

    monkeypatch.setattr(agents, "serving", serving)
    output, database = tmp_path / "found.json", "sqlite:///beats.db"
    size = ["--agents", "8", "--seconds", "1"]
    main(["service", "heartbeats", *size, "--database", database, "-o", str(output)])
    assert started == [("--database", database)]
    found = {row["what"]: row for row in json.loads(output.read_text())["heartbeats"]["findings"]}
    assert found["8 agents: heartbeats"]["value"] == 4
    for name in ("responses other than 200", "agents lost", "the run continued undisturbed"):
        assert found[name]["verdict"] == "met", name
