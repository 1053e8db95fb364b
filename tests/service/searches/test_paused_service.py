"""A service on PostgreSQL pauses for longer than its leases: another one takes its search over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from support.databases import PostgresDatabases
from support.paths import TESTS
from support.processes import is_alive
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Event
from zbv_service.settings import async_url
from zbv_solver.verify.verifier import verify

LEASE_SECONDS = 2.0


@dataclass
class Served:
    """A service process with one slot for searches, and a client of it."""

    process: subprocess.Popen[str]
    client: Client
    log: Path

    @property
    def search_processes(self) -> list[int]:
        """The ids of its search processes, which its fork server has started."""
        return [each for server in children(self.process.pid) for each in children(server)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the service alone, not to its search processes."""
        self.process.send_signal(number)


def children(process_id: int) -> list[int]:
    """The ids of the children of a process that still run."""
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(each) for task in tasks for each in task.read_text().split() if is_alive(int(each))]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


@pytest.fixture
def database(postgres: PostgresDatabases) -> Iterator[str]:
    with postgres.migrated() as url:
        yield url


@pytest.fixture
def services(database: str, tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    settings = {"ZBV_AUTH": "none", "ZBV_DATABASE": database, "ZBV_SEARCHES": "1"}
    times = {"ZBV_LEASE_SECONDS": str(LEASE_SECONDS), "ZBV_HEARTBEAT_SECONDS": "0.3"}
    environment = {**os.environ, **settings, **times, "PYTHONPATH": path}
    with ExitStack() as stack:
        made = []
        for index in range(2):
            log = tmp_path / f"service-{index}.log"
            process = subprocess.Popen(
                [sys.executable, "-m", "support.patient_searches", "serve", "--port", "0"],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")),
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            made.append((process, log))
        found = []
        for process, log in made:
            assert process.stdout is not None
            while (address := re.search(r"http://[^/\s]+", line := process.stdout.readline())) is None:
                assert line, log.read_text()
            found.append(Served(process, stack.enter_context(Client(address[0], timeout=DEADLINE)), log))
        yield found[0], found[1]


def test_a_search_of_a_paused_service_continues_in_another_one_and_ends_once(
    services: tuple[Served, Served], database: str
) -> None:
    engine = create_engine(async_url(database))

    def owner(search_id: str) -> int | None:
        with engine.connect() as connection:
            query = text("SELECT lease_owner FROM searches WHERE id = :id")
            found = connection.execute(query, {"id": search_id}).scalar_one()
        return None if found is None else int(found.split(":")[1])

    def begun(client: Client, seed: int) -> str:
        options = {"effort": "thorough", "time_limit": 600.0, "seed": seed}
        search_id = client.submit(PROBLEM, options).id
        until(lambda: client.search(search_id).objective is not None, f"a plan of {search_id}")
        return search_id

    first = begun(services[0].client, 1)
    paused, other = sorted(services, key=lambda service: service.process.pid != owner(first))
    (searching,) = paused.search_processes
    with ThreadPoolExecutor(1) as threads:
        # Who follows a search at the paused service sees the same events as everybody else.
        events: list[Event] = []

        def follow() -> None:
            for event in paused.client.events(first):
                events.append(event)

        followed = threads.submit(follow)
        until(lambda: len(events) == 3, "a follower of the first attempt")
        paused.send(signal.SIGSTOP)
        until(lambda: owner(first) == other.process.pid, "another owner")
        until(lambda: other.client.search(first).attempts == 2, "another attempt")
        assert is_alive(searching), "it does not know yet"

        paused.send(signal.SIGCONT)
        # What the search process of the paused service returns is late.
        until(lambda: f"search {first} now belongs to another service" in paused.log.read_text(), "the fence")
        assert (other.client.search(first).state, owner(first)) == ("running", other.process.pid)

        # The other service has no free slot, so the paused one computes the next search.
        second = begun(other.client, 2)
        assert owner(second) == paused.process.pid
        assert len(paused.search_processes) == 1, "the late search still has its process"

        for search_id, service in ((first, paused), (second, other)):
            service.client.cancel(search_id)
            assert service.client.wait(search_id, timeout=DEADLINE).state == "cancelled"
        followed.result(DEADLINE)
    assert events == list(other.client.events(first))
    kinds = [event.data.get("reason", event.kind) for event in events]
    assert kinds == [
        *("submitted", "started", "improvement", "service-lost", "started"),
        *("cancel-requested", "end"),
    ]
    ended = other.client.search(first)
    verify(other.client.plan(str(ended.plan_id)))
    with engine.connect() as connection:
        plans = connection.execute(text("SELECT count(*) FROM plans")).scalar_one()
    assert plans == 1, "both searches have the same plan"
    engine.dispose()
    for service in services:
        assert "Traceback" not in service.log.read_text()
