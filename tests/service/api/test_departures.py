"""Clients that disconnect before they are answered: what the service computes for them ends."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support import fake_searches
from support.fake_kinds import kinds
from support.fake_searches import orders_of
from support.live import Live, listening
from support.processes import is_alive
from support.serving import DEADLINE, PROBLEM, until
from zbv_service.app import create_app
from zbv_service.compute.processes import IsolatedProcesses
from zbv_service.settings import Settings
from zbv_solver.problem.reading import parse_problem

GET = (
    "/v1/plans/{plan}/simulation?scenarios=10",
    "/v1/plans/{plan}/ranks/0",
    "/v1/plans/{plan}/export/svg",
    "/plans/{plan}",
    "/plans/{plan}/actions",
    "/plans/{plan}/thumbnail.png",
    "/plans/{plan}/compare",
    "/plans/{plan}/frontier",
)
POST = ("/v1/problems/estimate", "/v1/problems/compare", "/v1/problems/pack")


def sleep(directory: str, *_arguments: object) -> None:
    """A computation that writes its process and lasts far too long."""
    Path(directory, "process").write_text(str(os.getpid()))
    time.sleep(10 * DEADLINE)


def every_computation_sleeps(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    submit = IsolatedProcesses.submit
    monkeypatch.setattr(
        IsolatedProcesses, "submit", lambda self, *_: submit(self, partial(sleep, str(directory)), None)
    )


@pytest.fixture
def live(settings: Settings) -> Iterator[Live]:
    with listening(create_app(settings, kinds=kinds(fake_searches.immediate))) as found:
        yield found


def post(live: Live, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{live.address}{path}", json=body, headers={"Host": "zbv"}, timeout=DEADLINE)


def import_plan(live: Live) -> str:
    ranks = orders_of(parse_problem(PROBLEM)).all_text()
    return str(post(live, "/v1/plans", {"problem": PROBLEM, "ranks": ranks}).json()["plan_id"])


def send(live: Live, method: str, path: str, body: bytes = b"") -> socket.socket:
    """Send a request, and do not read its answer."""
    at = urlsplit(live.address)
    connection = socket.create_connection((at.hostname, at.port), timeout=DEADLINE)
    head = f"{method} {path} HTTP/1.1\r\nHost: zbv\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize(
    ("method", "path"), [("GET", path) for path in GET] + [("POST", path) for path in POST]
)
async def test_the_computation_of_a_request_ends_when_its_client_disconnects(
    method: str, path: str, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = import_plan(live)
    every_computation_sleeps(monkeypatch, tmp_path)
    batch = {"sequences": [1, 2], "max_tokens": 4, "problem": {**PROBLEM}}
    body = json.dumps({"batch": batch} if path.endswith("pack") else {"problem": PROBLEM}).encode()
    started = tmp_path / "process"
    connection = send(live, method, path.format(plan=plan), body if method == "POST" else b"")
    await until(lambda: started.exists() and bool(started.read_text()), "the computation begins")
    process = int(started.read_text())
    connection.close()
    await until(lambda: not is_alive(process), "the computation ends")


async def test_a_computation_ends_when_the_last_of_its_clients_disconnects(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GET[0].format(plan=import_plan(live))
    every_computation_sleeps(monkeypatch, tmp_path)
    started = tmp_path / "process"
    first, second = send(live, "GET", path), send(live, "GET", path)
    await until(lambda: started.exists() and bool(started.read_text()), "the computation begins")
    process = int(started.read_text())
    await until(lambda: _readers(live) == 2, "both wait for it")
    first.close()
    await until(lambda: _readers(live) == 1, "one has left")
    assert is_alive(process)
    second.close()
    await until(lambda: not is_alive(process), "the computation ends")


def _readers(live: Live) -> int:
    return int(live.app.state.application.plans._simulations._readers.total())


def test_a_computation_past_its_deadline_says_what_to_do(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = settings.model_copy(update={"computation_seconds": 0.5})
    with listening(create_app(short, kinds=kinds(fake_searches.immediate))) as live:
        every_computation_sleeps(monkeypatch, tmp_path)
        answer = post(live, "/v1/problems/estimate", {"problem": PROBLEM})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "--computation-seconds" in answer.json()["detail"]
