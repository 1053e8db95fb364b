"""Two services on one PostgreSQL, and a Dask cluster that computes: real processes, killed one by one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from support.paths import TESTS
from support.serving import DEADLINE, PROBLEM
from zbv_models.layouts.answer import ranking_json
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.search import best_layouts
from zbv_service.client import Client, Search
from zbv_service.documents.layouts import LayoutRequest, read_layouts
from zbv_service.settings import async_url
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

COMMAND = [sys.executable, "-m", "support.patient_searches"]

LAYOUTS: dict[str, Any] = {
    "model": {"presets": ["llama-3.1-8b"]},
    "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h200"},
    **{"fixed": {"pipeline_parallel": 2}, "global_batch": 4, "top": 1},
}
TORCH_LAYOUTS = {**LAYOUTS, "executor": "torch"}
EIGHT_GPUS = {"nodes": 1, "gpus_per_node": 8, "device": "h100"}
MANY_LAYOUTS = {**LAYOUTS, "cluster": EIGHT_GPUS, "top": 20, "options": {"effort": "thorough"}}
"""Plans a layout at once, and then waits."""
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

    def readiness(self) -> tuple[int, str]:
        """Status and text of /readyz."""
        answer = self.http.get("/readyz")
        return answer.status_code, answer.text


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

    def owner_of(self, search_id: str) -> int | None:
        """Process id of the service that has leased a search."""
        owner = self._column("lease_owner", search_id)
        return None if owner is None else int(owner.split(":")[1])

    def crashes(self, search_id: str) -> int:
        """The crashes that count against a search."""
        return int(self._column("crashes", search_id))

    def _column(self, name: str, search_id: str) -> Any:
        with self._engine.connect() as connection:
            query = text(f"SELECT {name} FROM searches WHERE id = :id")
            return connection.execute(query, {"id": search_id}).scalar_one()

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
        command = [*COMMAND, "serve", "--port", "0", "--executor", executor]
        process = subprocess.Popen(
            command,
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


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def begun(site: Site, seed: int) -> Search:
    """A search that has found a plan and waits; each seed is another search."""
    client = site.services[seed % 2].client
    options = {"effort": "thorough", "time_limit": 600.0, "seed": seed}
    search_id = client.submit(PROBLEM, options).id
    until(lambda: client.search(search_id).objective is not None, f"a plan of {search_id}")
    return client.search(search_id)


def begun_layouts(site: Site) -> Search:
    """A long search for layouts that has planned one and continues."""
    client = site.services[0].client
    search_id = client.submit_layouts(MANY_LAYOUTS).id
    until(lambda: client.search(search_id).objective is not None, f"a layout of {search_id}")
    return client.search(search_id)


def ended_by_cancellation(client: Client, asked: Search) -> Search:
    """The end of a cancelled search of either kind."""
    ended = client.wait(asked.id, timeout=DEADLINE)
    assert ended.state == "cancelled"
    verify(client.plan(str(ended.plan_id)))
    return ended


def expected_answer(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the solver, in this process."""
    request = read_layouts(LayoutRequest.model_validate(body))
    top = body["top"]
    if "executor" in body:
        ranking = executor_layouts(request.layouts, request.setting, body["executor"], top)
    else:
        ranking = best_layouts(request.layouts, request.setting, top)
    answer = ranking_json(ranking, request, with_plans=False)
    for layout, planned in zip(answer["layouts"], ranking.best, strict=True):
        layout["plan_id"] = planned.plan.plan_id
    return answer


def test_services_share_the_work_and_find_the_plans_of_the_solver(site: Site) -> None:
    until(lambda: all(service.readiness()[0] == 200 for service in site.services), "readiness")
    clients = [service.client for service in site.services]
    submitted = [clients[seed].submit(PROBLEM, {"effort": "quick", "seed": seed}) for seed in range(2)]
    for seed, asked in enumerate(submitted):
        done = clients[1 - seed].wait(asked.id, timeout=DEADLINE)
        expected = search(parse_problem(PROBLEM), SearchOptions("quick", seed=seed))
        assert (done.state, done.plan_id) == ("done", expected.plan_id)


def test_layouts_searched_on_workers_are_those_of_the_solver(site: Site) -> None:
    clients, bodies = [service.client for service in site.services], (LAYOUTS, TORCH_LAYOUTS)
    asked = [client.submit_layouts(body) for client, body in zip(clients, bodies, strict=True)]
    for found, client, body in zip(asked, reversed(clients), bodies, strict=True):
        expected = expected_answer(body)
        done = client.wait(found.id, timeout=DEADLINE)
        assert (done.state, done.answer) == ("done", expected)
        assert done.plan_id == expected["layouts"][0]["plan_id"]
        *kinds, end = [event.kind for event in client.events(found.id)]
        assert end == "end"
        assert {"state", "improvement"} <= set(kinds) <= {"state", "improvement", "progress"}


@pytest.mark.parametrize("kind", ["plans", "layouts"])
def test_any_service_cancels_a_search_of_another_one_on_a_remote_worker(site: Site, kind: str) -> None:
    running = begun(site, 2) if kind == "plans" else begun_layouts(site)
    owner = site.owner_of(running.id)
    other = next(service for service in site.services if service.process.pid != owner)
    began = time.monotonic()
    other.client.cancel(running.id)
    assert ended_by_cancellation(other.client, running).attempts == 1
    assert time.monotonic() - began < 60.0  # it would take minutes


def test_killing_scheduler_worker_and_service_in_mid_search_loses_nothing(site: Site) -> None:
    before = [begun(site, 1), begun_layouts(site)]
    first, second = site.services

    def states() -> list[str]:
        return sorted(first.client.search(found.id).state for found in before)

    # A worker that receives SIGTERM gives its search back; this is no crash.
    site.workers[0].send_signal(signal.SIGTERM)
    until(lambda: states() == ["queued", "running"], "the return of a search")
    assert [site.crashes(found.id) for found in before] == [0, 0]

    # The scheduler, and with it the workers. This is no crash either; the services wait for another one.
    site.scheduler.send_signal(signal.SIGKILL)
    until(lambda: "Searches wait: The Dask scheduler" in first.readiness()[1], "the loss of the scheduler")
    until(lambda: states() == ["queued", "queued"], "the queue")
    assert [site.crashes(found.id) for found in before] == [0, 0]
    site.cluster.start_scheduler()

    site.workers = [site.cluster.start_worker() for _ in range(2)]
    until(lambda: states() == ["running", "running"], "the searches' return")

    # A service: the other one takes over its searches.
    victim = next(s for s in site.services if s.process.pid == site.owner_of(before[0].id))
    survivor = second if victim is first else first
    victim.process.send_signal(signal.SIGKILL)
    # A worker, and with it the search that it computes.
    site.workers[0].send_signal(signal.SIGKILL)

    def is_back(found: Search) -> bool:
        seen = survivor.client.search(found.id)
        is_ours = site.owner_of(found.id) == survivor.process.pid
        return seen.state == "running" and is_ours and seen.objective is not None

    # One worker remains, so the two searches run one after the other.
    until(lambda: any(map(is_back, before)), "a search in the other service")
    plan, layouts = before
    survivor.client.cancel(plan.id)
    # A cancelled search for layouts has those of its last attempt.
    until(partial(is_back, layouts), "a layout")
    survivor.client.cancel(layouts.id)
    for found in before:
        ended = ended_by_cancellation(survivor.client, found)
        assert ended.attempts >= 2
        if found is plan:
            assert ended.objective is not None
            assert found.objective is not None
            assert ended.objective <= found.objective * (1 + 1e-9)
    assert sum(site.crashes(found.id) for found in before) <= 1
    expected = search(parse_problem(PROBLEM), SearchOptions("quick", seed=9))
    asked = survivor.client.submit(PROBLEM, {"effort": "quick", "seed": 9})
    assert survivor.client.wait(asked.id, timeout=DEADLINE).plan_id == expected.plan_id
    assert "Traceback" not in survivor.log.read_text()
