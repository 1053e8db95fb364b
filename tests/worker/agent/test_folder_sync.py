"""Traces and logs reach the service, and a plan reaches the ranks, without delaying anything else."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from support.orders import random_orders
from support.problems import uniform
from support.processes import DEADLINE, wait_until
from zbv_service.client import AgentClient, NodeWork
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.search.assemble import make_plan
from zbv_worker.agent.folder_sync import LOG_BYTES, FolderSync, log_end
from zbv_worker.host.state_files import NEXT_PLAN, write_json

WORK = NodeWork("a" * 32, 1, 1, 2, 2, "h:1", "p" * 64, "a:b", {})
RANKS = (2, 3)


class Service:
    """A fake transport of a sync: records what the sync sends and returns prepared answers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes]] = []
        self.plan: Plan | None = None
        self.status = 204
        self.is_away = False
        self.holds = threading.Event()
        self.holds.set()

    def connect(self) -> AgentClient:
        return AgentClient("http://zbv", transport=httpx.MockTransport(self.answer), retries=0)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.holds.wait(DEADLINE)
        if self.is_away:
            raise httpx.ConnectError("away")
        if request.method == "GET":
            assert self.plan is not None
            return httpx.Response(200, json=plan_json(self.plan))
        name = "/".join(request.url.path.split("/")[-2:])
        self.seen.append((name, gzip.decompress(request.content)))
        document = {"type": "t", "title": "T", "status": self.status, "detail": "D"}
        return httpx.Response(self.status, json=None if self.status == 204 else document)

    def names(self) -> list[str]:
        return [name for name, _ in list(self.seen)]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def sync(service: Service, tmp_path: Path) -> FolderSync:
    return FolderSync("agent", WORK, RANKS, tmp_path, service.connect, pause=0.02)


def finish(sync: FolderSync) -> None:
    """Let a sync send what is left."""
    sync.finish()
    assert sync.wait(DEADLINE)


def measured(folder: Path, rank: int, step: int) -> bytes:
    path = folder / f"trace-{rank}.json"
    write_json(path, {"step": step})
    return path.read_bytes()


def printed(folder: Path, local_rank: int, **files: str) -> None:
    logs = folder / "logs" / "run_x1" / "attempt_0" / str(local_rank)
    logs.mkdir(parents=True)
    for name, text in files.items():
        (logs / f"{name}.log").write_text(text)


def a_plan() -> Plan:
    problem = uniform(2, 3)
    return make_plan(problem, random_orders(problem, Random(1)), method="random")


def test_a_trace_is_sent_only_when_it_changes(sync: FolderSync, service: Service, tmp_path: Path) -> None:
    first = measured(tmp_path, 2, 0)
    sync.start()
    wait_until(lambda: service.seen, "a file is sent")
    time.sleep(0.2)
    assert service.seen == [("2/trace", first)]
    second, third = measured(tmp_path, 2, 1), measured(tmp_path, 3, 1)
    wait_until(lambda: len(service.seen) == 3, "both files are sent")
    assert sorted(service.seen[1:]) == sorted([("2/trace", second), ("3/trace", third)])
    finish(sync)
    assert len(service.seen) == 3


def test_events_are_sent_as_the_rank_wrote_them_and_when_they_change(
    sync: FolderSync, service: Service, tmp_path: Path
) -> None:
    path = tmp_path / "events-3.json"
    write_json(path, {"rank": 3, "events": [1]})
    sync.start()
    wait_until(lambda: service.seen, "a file is sent")
    before = path.stat()
    write_json(tmp_path / "new", {"rank": 3, "events": [1, 2]})
    os.utime(tmp_path / "new", ns=(before.st_atime_ns, before.st_mtime_ns))  # within one tick of the clock
    (tmp_path / "new").replace(path)
    finish(sync)
    assert [(name, json.loads(text)["events"]) for name, text in service.seen] == [
        ("3/events", [1]),
        ("3/events", [1, 2]),
    ]


def test_remaining_files_are_sent_at_the_end(sync: FolderSync, service: Service, tmp_path: Path) -> None:
    sync.start()
    printed(tmp_path, 0, stderr="why\n", stdout="what\n")
    printed(tmp_path, 1, stdout="")
    last = measured(tmp_path, 3, 9)
    assert not sync.wait(0)
    finish(sync)
    assert service.seen == [("3/trace", last), ("2/log", b"what\nwhy\n"), ("3/log", b"")]


def test_a_service_that_is_away_gets_it_later(sync: FolderSync, service: Service, tmp_path: Path) -> None:
    service.is_away = True
    measured(tmp_path, 2, 0)
    sync.start()
    time.sleep(0.1)
    newest = measured(tmp_path, 2, 1)
    service.is_away = False
    # An attempt that read the older file may reach the service that is back; the newer one follows.
    wait_until(lambda: service.seen[-1:] == [("2/trace", newest)], "the newest trace is sent")
    finish(sync)
    assert service.seen[-1] == ("2/trace", newest)


def test_refused_files_are_not_sent_again(sync: FolderSync, service: Service, tmp_path: Path) -> None:
    service.status = 413
    measured(tmp_path, 2, 0)
    sync.start()
    wait_until(lambda: service.seen, "a file is sent")
    time.sleep(0.2)
    assert service.names() == ["2/trace"]
    finish(sync)


@pytest.mark.parametrize("status", [404, 410])
def test_a_lost_agent_sends_no_more(sync: FolderSync, service: Service, tmp_path: Path, status: int) -> None:
    service.status = status
    measured(tmp_path, 2, 0)
    measured(tmp_path, 3, 0)
    sync.start()
    assert sync.wait(DEADLINE)
    assert service.names() == ["2/trace"]


def test_a_slow_service_delays_nothing_else(sync: FolderSync, service: Service, tmp_path: Path) -> None:
    service.holds.clear()
    measured(tmp_path, 2, 0)
    sync.start()
    time.sleep(0.1)
    sync.fetch_plan("b" * 64)
    sync.finish()
    assert not sync.wait(0.1)
    service.is_away = True
    service.holds.set()
    assert sync.wait(DEADLINE)


def test_a_plan_is_downloaded_once_and_completely(sync: FolderSync, service: Service, tmp_path: Path) -> None:
    plan = service.plan = a_plan()
    path = tmp_path / NEXT_PLAN
    sync.start()
    sync.fetch_plan(None)
    sync.fetch_plan(WORK.plan_id)  # what its ranks run already
    time.sleep(0.1)
    assert not path.exists()
    sync.fetch_plan(plan.plan_id)
    wait_until(path.exists, "the plan is downloaded")
    assert json.loads(path.read_text()) == plan_json(plan)
    path.unlink()
    sync.fetch_plan(plan.plan_id)
    time.sleep(0.1)
    assert not path.exists()
    finish(sync)


@pytest.mark.parametrize("wrong", ["other", "altered"])
def test_a_wrong_plan_is_not_passed_on(
    sync: FolderSync, service: Service, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = service.plan = a_plan()
    wanted = plan.plan_id if wrong == "altered" else "b" * 64

    def altered(document: Any) -> httpx.Response:
        return httpx.Response(200, json={**plan_json(plan), "ranks": plan.orders.all_text()[::-1]})

    if wrong == "altered":
        monkeypatch.setattr(service, "answer", altered)
    sync.start()
    sync.fetch_plan(wanted)
    finish(sync)
    assert not (tmp_path / NEXT_PLAN).exists()


def test_the_end_of_a_long_log_has_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    assert log_end(path, 20) == b"line 98\nline 99\n"
    assert log_end(path, LOG_BYTES) == path.read_bytes()
    path.write_text("x" * 100)
    assert log_end(path, 20) == b"x" * 20
    assert log_end(tmp_path / "none", 20) == b""
