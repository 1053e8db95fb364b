"""The service in real processes, with real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.paths import TESTS
from support.processes import is_alive
from support.refusals import refusal
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Search, tokens
from zbv_solver.verify.verifier import verify

COMMAND = [sys.executable, "-m", "support.patient_searches", "serve"]
LONG_OPTIONS = {"effort": "thorough", "seed": 1}
"""A search that goes on after its first plan, without work for the processor."""


@dataclass
class Served:
    """A service process and a client of it."""

    process: subprocess.Popen[str]
    address: str
    client: Client

    def ended_with(self, signal_number: int) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=DEADLINE)


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts services: ``serve(directory, port)``. Remaining ones are killed at the end."""
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        environment.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))

        def start(directory: Path, port: int = 0) -> Served:
            log = stack.enter_context((directory / "log").open("a"))
            command = [*COMMAND, "--port", str(port), "--searches", "2"]
            process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, (line, (directory / "log").read_text())
            client = stack.enter_context(Client(found[0], timeout=DEADLINE))
            return Served(process, found[0], client)

        yield start


def until(look: Callable[[], Search], holds: Callable[[Search], bool]) -> Search:
    deadline = time.monotonic() + DEADLINE
    while not holds(found := look()):
        assert time.monotonic() < deadline, f"did not happen in time: {found}"
        time.sleep(0.05)
    return found


def begun(served: Served) -> Search:
    """A long search that has found a plan and continues."""
    search_id = served.client.submit(PROBLEM, LONG_OPTIONS).id
    found = until(lambda: served.client.search(search_id), lambda seen: seen.objective is not None)
    assert found.state == "running"
    return found


def begun_again(client: Client, search_id: str, attempts: int) -> Search:
    return until(lambda: client.search(search_id), lambda seen: seen.attempts == attempts)


def children_of(process_id: int) -> list[int]:
    """All descendants of a process."""
    lists = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [int(child) for found in lists for child in found.read_text().split()]
    return [below for child in children for below in (child, *children_of(child))]


def test_no_signal_loses_a_search_or_leaves_a_process(serve: Serve, tmp_path: Path) -> None:
    """Three services, one after the other, with one directory, port, search and client."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    served = serve(tmp_path, port)
    before = begun(served)
    token = tokens.find(served.address)
    assert token is not None
    polling = httpx.Client(base_url=served.address, headers={"Authorization": f"Bearer {token}"})
    other = served.client.submit(PROBLEM, {"effort": "quick"})
    for attempts, number in enumerate((signal.SIGKILL, signal.SIGTERM), start=2):
        deadline = time.monotonic() + DEADLINE
        while not (below := children_of(served.process.pid)):
            assert time.monotonic() < deadline, "the service starts no process for its searches"
            time.sleep(0.05)
        status = served.ended_with(number)
        assert status == (-number if number == signal.SIGKILL else 0)
        deadline = time.monotonic() + DEADLINE
        while alive := [process_id for process_id in below if is_alive(process_id)]:
            assert time.monotonic() < deadline, f"orphans: {alive}"
            time.sleep(0.05)

        served = serve(tmp_path, port)
        polled = polling.get(f"/v1/searches/{before.id}")
        assert (polled.status_code, polled.json()["id"]) == (200, before.id), polled.text
        resumed = begun_again(served.client, before.id, attempts)
        assert resumed.objective is not None
        assert before.objective is not None
        assert resumed.objective <= before.objective * (1 + 1e-9)
        before = resumed

    client = served.client
    assert client.wait(other.id, timeout=DEADLINE).state == "done"
    until(lambda: client.search(before.id), lambda seen: seen.state == "running")
    client.cancel(before.id)
    after = client.wait(before.id, timeout=DEADLINE)
    assert (after.state, after.attempts) == ("cancelled", 3)
    assert after.objective is not None
    assert before.objective is not None
    assert after.objective <= before.objective * (1 + 1e-9)
    verify(client.plan(str(after.plan_id)))
    assert polling.get(f"/v1/searches/{before.id}").json()["state"] == "cancelled"
    polling.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--database", "sqlite:///no/such/directory/zbv.db"], "directory must exist"),
        (["--database", f"sqlite:///{__file__}"], "cannot use the database"),
        (["--port", "PORT"], "cannot listen on 127.0.0.1 port PORT"),
        (["--tls-cert", "no.pem", "--tls-key", "no.key"], "cannot use no.pem, no.key for TLS"),
        (["--host", "0.0.0.0"], "zbv-service token create --name admin --scope admin --database sqlite:///"),
    ],
)
def test_a_service_that_cannot_start_says_why_without_a_traceback(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        status, said = refusal(capsys, "serve", *(flag.replace("PORT", port) for flag in flags))
    assert status == 2
    assert message.replace("PORT", port) in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("zbv_service.client", ("fastapi", "starlette", "sqlalchemy", "numba")),
        ("zbv_service.app", ("ortools", "zbv_solver.search.run")),
        ("zbv_service.commands.run", ("fastapi", "sqlalchemy", "torch")),
    ],
)
def test_what_starts_often_imports_no_more_than_it_needs(module: str, heavy: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert ran.stdout.strip() == "[]"
