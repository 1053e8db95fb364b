"""The service in real processes, with real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.paths import TESTS
from support.processes import is_alive, wait_until
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


def begun(client: Client, search_id: str, attempts: int) -> Search:
    """A search that has found a plan and continues, in this attempt."""

    def has_found() -> bool:
        found = client.search(search_id)
        return found.attempts == attempts and found.state == "running" and found.objective is not None

    wait_until(has_found, f"attempt {attempts}")
    return client.search(search_id)


def children_of(process_id: int) -> list[int]:
    """All descendants of a process."""
    lists = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [int(child) for found in lists for child in found.read_text().split()]
    return [below for child in children for below in (child, *children_of(child))]


def none_lives(process_ids: list[int]) -> bool:
    return not any(map(is_alive, process_ids))


def test_no_signal_loses_a_search_or_leaves_a_process(serve: Serve, tmp_path: Path) -> None:
    """Three services, one after the other, with one directory, port, search and client."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    served = serve(tmp_path, port)
    before = begun(served.client, served.client.submit(PROBLEM, LONG_OPTIONS).id, 1)
    token = tokens.find(served.address)
    assert token is not None
    polling = httpx.Client(base_url=served.address, headers={"Authorization": f"Bearer {token}"})
    other = served.client.submit(PROBLEM, {"effort": "standard", "seed": 2})
    for attempts, number in enumerate((signal.SIGKILL, signal.SIGTERM), start=2):
        below = children_of(served.process.pid)
        assert below, "the process of the search"
        status = served.ended_with(number)
        assert status == (-number if number == signal.SIGKILL else 0)
        wait_until(partial(none_lives, below), f"the end of {below}")

        served = serve(tmp_path, port)
        polled = polling.get(f"/v1/searches/{before.id}")
        assert (polled.status_code, polled.json()["id"]) == (200, before.id), polled.text
        resumed = begun(served.client, before.id, attempts)
        assert (resumed.objective or 0) <= (before.objective or 0) * (1 + 1e-9)
        before = resumed

    client = served.client
    assert client.wait(other.id, timeout=DEADLINE).state == "done"
    client.cancel(before.id)
    after = client.wait(before.id, timeout=DEADLINE)
    assert (after.state, after.attempts) == ("cancelled", 3)
    assert (after.objective or 0) <= (before.objective or 0) * (1 + 1e-9)
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
