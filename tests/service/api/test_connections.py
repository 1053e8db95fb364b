"""Connections beyond the limit, clients that disconnect, and checks of readiness at any rate."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import event
from support.live import Live, live_service
from support.processes import announce, is_alive
from support.serving import DEADLINE, PLAN, PROBLEM, Serving, until
from zbv_service.api import readiness
from zbv_service.client import Client
from zbv_service.compute.processes import IsolatedProcesses
from zbv_service.database import Database

MOST = 3
"""The first number of connections that is refused."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(tmp_path_factory.mktemp("connections"), max_connections=MOST) as found:
        yield found


def send(live: Live, method: str, path: str, body: bytes = b"") -> socket.socket:
    """Send a request, and do not read its answer."""
    at = urlsplit(live.address)
    connection = socket.create_connection((at.hostname, at.port), timeout=DEADLINE)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


def test_a_connection_above_the_limit_is_refused(live: Live) -> None:
    with ExitStack() as stack:
        for status in (*[b"200"] * (MOST - 1), b"503"):  # after its response, a connection is counted
            connection = stack.enter_context(send(live, "GET", "/healthz"))
            assert connection.recv(65_536).startswith(b"HTTP/1.1 " + status)
    with httpx.Client(base_url=live.address, timeout=DEADLINE) as http:
        assert http.get("/healthz").status_code == 200


REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/plans/{plan}/export/svg", None),
    ("GET", "/plans/{plan}/compare", None),
    ("GET", "/plans/{plan}/frontier", None),
    ("POST", "/v1/problems/estimate", {"problem": PROBLEM}),
)


def sleep(directory: str, *_arguments: object) -> None:
    """A computation that writes its process and lasts far too long."""
    announce(Path(directory, "process"), str(os.getpid()))
    time.sleep(10 * DEADLINE)


async def test_the_computation_of_a_request_ends_when_its_client_disconnects(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(live.address) as client:
        plan = client.import_plan(PLAN)
    submit = IsolatedProcesses.submit
    monkeypatch.setattr(
        IsolatedProcesses, "submit", lambda self, *_: submit(self, partial(sleep, str(tmp_path)), None)
    )
    started = tmp_path / "process"
    for method, path, body in REQUESTS:
        connection = send(live, method, path.format(plan=plan), json.dumps(body).encode() if body else b"")
        await until(started.exists, f"the computation of {path}")
        connection.close()
        await until(lambda: not is_alive(int(started.read_text())), f"the end of that of {path}")
        started.unlink()


async def test_concurrent_requests_share_one_ping(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pings = 0
    go_on = asyncio.Event()

    async def ping(_self: Database) -> None:
        nonlocal pings
        pings += 1
        await go_on.wait()

    monkeypatch.setattr(Database, "ping", ping)
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 3600.0)
    async with serving("honest") as service:
        asked = [asyncio.create_task(service.http.get("/readyz")) for _ in range(50)]
        await until(lambda: pings > 0, "the database is pinged")
        asked[0].cancel()  # the first request is cancelled, and the others continue
        go_on.set()
        answers = await asyncio.gather(*asked[1:])
        assert {answer.status_code for answer in answers} == {200}
        assert (await service.http.get("/readyz")).status_code == 200
        assert pings == 1


async def test_a_database_that_cannot_be_written_is_not_ready_although_it_can_be_read(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FRESH_SECONDS", 0.0)
    async with serving("honest") as service:
        engine = service.app.state.application.database._engine.sync_engine
        pragma = ["ON"]

        def refuse_writes(connection: Any, *_: object) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA query_only={pragma[0]}")
            cursor.close()

        event.listen(engine, "checkout", refuse_writes)
        assert (await service.submit()).status_code == 503
        answer = await service.http.get("/readyz")
        assert answer.status_code == 503
        assert [error["check"] for error in answer.json()["errors"]] == ["database"]
        assert "cannot be written" in answer.json()["detail"]
        assert (await service.http.get("/v1/searches")).status_code == 200
        pragma[0] = "OFF"
        assert (await service.submit()).status_code == 202
        assert (await service.http.get("/readyz")).status_code == 200
