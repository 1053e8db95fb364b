"""Two services on one PostgreSQL, and a Dask cluster that computes: real processes, killed one by one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text
from support.dask_cluster import DaskCluster
from support.databases import PostgresDatabases
from support.fake_kinds import ranking
from support.fake_searches import orders_of
from support.paths import TESTS
from support.processes import wait_until
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Search
from zbv_service.documents.problems import unpack
from zbv_service.settings import async_url
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.verify.verifier import verify

COMMAND = [sys.executable, "-m", "support.patient_searches"]
LAYOUTS: dict[str, Any] = {
    "model": {"presets": ["llama-3.1-8b"]},
    "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h200"},
    "global_batch": 4,
}
LEASE_SECONDS = 2.0
# Services, the scheduler and workers import the searches from there.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
}


@dataclass
class Served:
    """A service process and a client of it."""

    process: subprocess.Popen[str]
    client: Client
    http: httpx.Client
    log: Path


class Site:
    """Services that share one database and one cluster."""

    def __init__(self, folder: Path, database: str, cluster: DaskCluster, stack: ExitStack):
        self._folder = folder
        self._stack = stack
        self._engine = create_engine(async_url(database))
        stack.callback(self._engine.dispose)
        self.cluster = cluster
        self.scheduler = cluster.start_scheduler()
        self.workers = [cluster.start_worker() for _ in range(2)]
        starting = [self._start(database, index) for index in range(2)]
        self.services = [self._listening(*started) for started in starting]

    def owner_of(self, search: Search) -> int | None:
        """Process id of the service that has leased a search."""
        owner = self._column("lease_owner", search)
        return None if owner is None else int(owner.split(":")[1])

    def crashes(self, *searches: Search) -> int:
        """The crashes that count against searches."""
        return sum(int(self._column("crashes", search)) for search in searches)

    def _column(self, name: str, search: Search) -> Any:
        with self._engine.connect() as connection:
            query = text(f"SELECT {name} FROM searches WHERE id = :id")
            return connection.execute(query, {"id": search.id}).scalar_one()

    def _start(self, database: str, index: int) -> tuple[subprocess.Popen[str], Path]:
        log = self._folder / f"service-{index}.log"
        environment = {
            **ENVIRONMENT,
            "ZBV_AUTH": "none",
            "ZBV_DATABASE": database,
            "ZBV_LEASE_SECONDS": str(LEASE_SECONDS),
            "ZBV_HEARTBEAT_SECONDS": "0.5",
        }
        executor = self.cluster.address.replace("tcp:", "dask:")
        process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--executor", executor],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._stack.enter_context(log.open("w")),
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process, log

    def _listening(self, process: subprocess.Popen[str], log: Path) -> Served:
        assert process.stdout is not None
        while (found := re.search(r"http://[^/\s]+", line := process.stdout.readline())) is None:
            assert line, log.read_text()
        client = self._stack.enter_context(Client(found[0], timeout=DEADLINE))
        http = self._stack.enter_context(httpx.Client(base_url=found[0], timeout=DEADLINE))
        return Served(process, client, http, log)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresDatabases) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        database = stack.enter_context(postgres.migrated())
        cluster = DaskCluster(folder, ENVIRONMENT)
        stack.callback(cluster.close)
        yield Site(folder, database, cluster, stack)


def asked(service: Served, kind: str, effort: str, seed: int = 1) -> Search:
    """A new search; each seed is another search for a plan."""
    if kind == "layouts":
        return service.client.submit_layouts({**LAYOUTS, "options": {"effort": effort}})
    return service.client.submit(PROBLEM, {"effort": effort, "time_limit": 600.0, "seed": seed})


def begun(service: Served, kind: str, seed: int = 1) -> Search:
    """A search that has found something, and waits."""
    search = asked(service, kind, "thorough", seed)
    wait_until(lambda: service.client.search(search.id).objective is not None, f"a result of {search.id}")
    return service.client.search(search.id)


def ended_by_cancellation(client: Client, asked: Search) -> Search:
    """The end of a cancelled search, which has a plan."""
    ended = client.wait(asked.id, timeout=DEADLINE)
    assert ended.state == "cancelled"
    plan = client.plan(str(ended.plan_id))
    if ended.kind == "plan":
        verify(plan)
    return ended


def test_services_share_the_work_of_both_kinds(site: Site) -> None:
    wait_until(lambda: all(each.http.get("/readyz").is_success for each in site.services), "readiness")
    one, other = site.services
    plan, layouts = asked(one, "plan", "standard"), asked(other, "layouts", "standard")
    problem = parse_problem(PROBLEM)
    done = other.client.wait(plan.id, timeout=DEADLINE)
    assert done.plan_id == make_plan(problem, orders_of(problem), method="patient").plan_id
    done = one.client.wait(layouts.id, timeout=DEADLINE)
    assert done.answer == unpack(ranking(2).answer or b"")
    assert [event.kind for event in one.client.events(layouts.id)][-2:] == ["improvement", "end"]


@pytest.mark.parametrize("kind", ["plan", "layouts"])
def test_any_service_cancels_a_search_of_another_one_on_a_remote_worker(site: Site, kind: str) -> None:
    running = begun(site.services[0], kind, 2)
    owner = site.owner_of(running)
    other = next(service for service in site.services if service.process.pid != owner)
    other.client.cancel(running.id)
    assert ended_by_cancellation(other.client, running).attempts == 1


def test_killing_scheduler_worker_and_service_in_mid_search_loses_nothing(site: Site) -> None:
    first, second = site.services
    plan, layouts = before = [begun(first, "plan", 3), begun(second, "layouts")]

    def states() -> list[str]:
        return sorted(first.client.search(found.id).state for found in before)

    # A worker that receives SIGTERM gives its search back; this is no crash.
    site.workers[0].send_signal(signal.SIGTERM)
    wait_until(lambda: states() == ["queued", "running"], "the return of a search")
    assert site.crashes(*before) == 0

    # The scheduler, and with it the workers. This is no crash either; the services wait for another one.
    site.scheduler.send_signal(signal.SIGKILL)
    lost = "Searches wait: The Dask scheduler"
    wait_until(lambda: lost in first.http.get("/readyz").text, "the loss of the scheduler")
    wait_until(lambda: states() == ["queued", "queued"], "the queue")
    assert site.crashes(*before) == 0
    site.cluster.start_scheduler()
    site.workers = [site.cluster.start_worker() for _ in range(2)]
    wait_until(lambda: states() == ["running", "running"], "the searches' return")

    # A service: the other one takes over its searches. A worker, and with it the search that it computes.
    victim = next(each for each in site.services if each.process.pid == site.owner_of(plan))
    survivor = second if victim is first else first
    victim.process.send_signal(signal.SIGKILL)
    site.workers[0].send_signal(signal.SIGKILL)

    def is_back(found: Search) -> bool:
        seen = survivor.client.search(found.id)
        is_ours = site.owner_of(found) == survivor.process.pid
        return seen.state == "running" and is_ours and seen.objective is not None

    # One worker remains, so the two searches run one after the other.
    wait_until(lambda: any(map(is_back, before)), "a search in the other service")
    survivor.client.cancel(plan.id)
    # A cancelled search for layouts has those of its last attempt.
    wait_until(partial(is_back, layouts), "a layout")
    survivor.client.cancel(layouts.id)
    for found in before:
        ended = ended_by_cancellation(survivor.client, found)
        assert ended.attempts >= 2
        assert ended.objective is not None
        assert found.objective is not None
        assert ended.objective <= found.objective * (1 + 1e-9)
    assert site.crashes(*before) <= 1
    later = asked(survivor, "plan", "standard", 9)
    assert survivor.client.wait(later.id, timeout=DEADLINE).state == "done"
    assert "Traceback" not in survivor.log.read_text()
