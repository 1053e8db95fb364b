"""The service in real processes, with the real search and real signals."""

from __future__ import annotations

import json
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
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes import is_alive
from support.refusals import refusal
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Search, tokens
from zbv_solver.plans.reading import parse_plan
from zbv_solver.verify.verifier import verify

COMMAND = [sys.executable, "-c", "import sys; from zbv_service.commands.cli import main; sys.exit(main())"]

# 384 actions with uneven costs: CP-SAT works on it long after the first plan.
LONG = {
    "pp_degree": 4,
    "microbatches": 16,
    "costs": {
        "forward": [1013, 971, 1187, 1031, 997, 1103, 953, 1409],
        "backward_input": [1109, 1069, 1301, 1123, 1087, 1213, 1039, 1523],
        "backward_weight": [701, 673, 821, 709, 691, 769, 659, 977],
        "p2p": 53,
    },
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 13},
}
LONG_OPTIONS = {"effort": "thorough", "time_limit": 600.0}


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

        def start(directory: Path, port: int = 0) -> Served:
            log = stack.enter_context((directory / "log").open("a"))
            command = [*COMMAND, "serve", "--port", str(port), "--searches", "2"]
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
    search_id = served.client.submit(LONG, LONG_OPTIONS).id
    found = until(lambda: served.client.search(search_id), lambda seen: seen.objective is not None)
    assert found.state == "running"
    return found


def begun_again(client: Client, search_id: str, attempts: int) -> Search:
    return until(lambda: client.search(search_id), lambda seen: seen.attempts == attempts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(process_id: int) -> list[int]:
    """All descendants of a process."""
    lists = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [int(child) for found in lists for child in found.read_text().split()]
    return [below for child in children for below in (child, *children_of(child))]


def test_no_signal_loses_a_search_or_leaves_a_process(serve: Serve, tmp_path: Path) -> None:
    """Three services, one after the other, with one directory, port, search and client."""
    port = free_port()
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


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One service for the tests that only send requests to it."""
    return serve(tmp_path_factory.mktemp("served"))


def submit(served_at: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "submit", "--server", served_at, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def test_submit_follows_a_search_and_writes_the_plan(served: Served, tmp_path: Path) -> None:
    problem, target = tmp_path / "problem.json", tmp_path / "plan.json"
    problem.write_text(json.dumps(PROBLEM))
    ran = submit(served.address, str(problem), "-o", str(target), "--effort", "quick")
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    plan = parse_plan(json.loads(target.read_text()))
    verify(plan)
    assert f"{served.address}/plans/{plan.plan_id}" in ran.stderr

    piped = submit(served.address, "-", "--effort", "quick", text=json.dumps(PROBLEM))
    assert json.loads(piped.stdout) == json.loads(target.read_text())


def wrong_texts() -> dict[str, tuple[str, int, str]]:
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "limit": 1}}
    negative = {**PROBLEM, "costs": {**PROBLEM["costs"], "forward": -1}}
    return {
        "broken JSON": ("{", 2, "not JSON"),
        "NaN": ("NaN", 2, "NaN"),
        "wrong number": (json.dumps(negative), 2, "/costs/forward"),
        "infeasible": (json.dumps(tight), 3, "smallest feasible limit"),
    }


@pytest.mark.parametrize("name", list(wrong_texts()))
def test_submit_reports_the_mistake_in_a_problem(
    served: Served, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, status, message = wrong_texts()[name]
    monkeypatch.setattr(sys, "stdin", StringIO(text))
    found, said = refusal(capsys, "submit", "--server", served.address, "-")
    assert found == status
    assert message in said


def test_submit_names_a_missing_file(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "nothing.json")
    status, said = refusal(capsys, "submit", "--server", served.address, missing)
    assert status == 2
    assert "nothing.json" in said


def test_submit_reports_that_no_service_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps(PROBLEM)))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        status, said = refusal(capsys, "submit", "--server", address, "-")
    assert status == 1
    assert "zbv-service serve" in said
    assert "Traceback" not in said


def test_a_port_in_use_is_reported_without_a_traceback(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = served.address.rpartition(":")[2]
    database = f"sqlite:///{tmp_path}/zbv.db"
    status, said = refusal(capsys, "serve", "--port", port, "--database", database)
    assert status == 2
    assert f"port {port}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--database", "zbv.db"], "sqlite:///"),
        (["--database", "mysql://x/y"], "mysql"),
        (["--searches", "0"], "searches"),
        (["--port", "70000"], "port"),
    ],
)
def test_a_wrong_setting_is_reported_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = refusal(capsys, "serve", *arguments)
    assert status == 2
    assert message in said


@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("sqlite:///no/such/directory/zbv.db", "directory must exist"),
        (f"sqlite:///{__file__}", "cannot use the database"),
    ],
)
def test_an_unusable_database_is_reported_without_a_traceback(
    database: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = refusal(capsys, "serve", "--database", database)
    assert status == 2
    assert message in said
    assert "Traceback" not in said


def test_the_client_imports_neither_web_framework_nor_database() -> None:
    program = (
        "import sys, zbv_service.client; "
        "print([name for name in ('fastapi', 'starlette', 'sqlalchemy', 'numba') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_a_service_starts_without_loading_the_planner() -> None:
    program = (
        "import sys, zbv_service.app; "
        "print([name for name in ('ortools', 'zbv_solver.search.run') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_the_client_reads_what_the_service_writes(served: Served) -> None:
    client = served.client
    seen: list[Search] = []
    found = client.submit(PROBLEM, {"effort": "quick", "seed": 7})
    done = client.wait(found.id, seen.append, timeout=DEADLINE)
    assert done.state == "done"
    assert seen[-1] == done
    assert found.id in [search.id for search in client.searches()]
    plan = client.plan(str(done.plan_id))
    rank = client.rank(plan.plan_id, 1)
    assert list(rank.actions) == plan.orders.actions(1)
    assert (rank.stages, rank.peers, rank.chunks) == ((1, 2), (0,), 2)
    document: dict[str, Any] = client.plan_document(plan.plan_id)
    assert client.import_plan(document) == plan.plan_id
    assert client.export(plan.plan_id, "torch-csv").count("\n") >= 2


def test_the_database_is_in_the_working_directory(served: Served) -> None:
    directory = Path(os.readlink(f"/proc/{served.process.pid}/cwd"))
    assert (directory / "zbv.db").exists()
