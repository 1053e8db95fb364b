"""Two services on one PostgreSQL, and a Dask cluster that computes: real processes, killed one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.databases import PostgresDatabases
from support.fake_kinds import ranking
from support.fake_searches import orders_of
from support.forked_ranks import SERVICES, ForkedProcess, fork_module
from support.processes import wait_for_line, wait_until
from support.served import PATH, Served, begun, owner_of, start_services, stored
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import Client, Search
from zbv_service.documents.problems import unpack
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.verify.verifier import verify
from zbv_worker.host.local_ranks import free_port

LAYOUTS: dict[str, Any] = {
    "model": {"presets": ["llama-3.1-8b"]},
    "cluster": {"nodes": 1, "gpus_per_node": 2, "device": "h200"},
    "global_batch": 4,
}


SCHEDULER, WORKER = "distributed.cli.dask_scheduler", "distributed.cli.dask_worker"
MODULES = (*SERVICES, SCHEDULER, WORKER, "zbv_service.searches.executors.cluster.executor")
"""What services, schedulers and workers import: the same process forks all of them."""


class Site:
    """Services that share one database and one Dask cluster, whose processes end with the stack."""

    def __init__(self, folder: Path, database: str, stack: ExitStack):
        self.folder, self.database, self.stack = folder, database, stack
        self.port, self.started = free_port(), 0
        self.scheduler = self.start_scheduler()
        self.workers = [self.start_worker() for _ in range(2)]
        executor = f"dask://127.0.0.1:{self.port}"
        settings = {"ZBV_AUTH": "none", "ZBV_DATABASE": database, "ZBV_EXECUTOR": executor}
        times = {"ZBV_LEASE_SECONDS": "6.0", "ZBV_HEARTBEAT_SECONDS": "0.5"}
        self.services = start_services(stack, folder, 2, variables=settings | times, modules=MODULES)

    def start_scheduler(self) -> ForkedProcess:
        """Start a scheduler; later ones use the same port."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        process, log = self._start(SCHEDULER, *address, "--no-dashboard", "--no-show")
        wait_for_line(process, log, r"Scheduler at:\s+(tcp://\S+)")
        return process

    def start_worker(self) -> ForkedProcess:
        """Start a worker for one search at a time, without waiting for it."""
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", str(DEADLINE))
        folder = ("--local-directory", str(self.folder))
        return self._start(WORKER, f"tcp://127.0.0.1:{self.port}", *options, *folder)[0]

    def _start(self, module: str, *arguments: str) -> tuple[ForkedProcess, Path]:
        self.started += 1
        log = self.folder / f"{module}-{self.started}.log"
        # Services, the scheduler and workers import the searches from there.
        process = fork_module(module, arguments, {**os.environ, "PYTHONPATH": PATH}, log, MODULES)
        self.stack.callback(process.wait, DEADLINE)
        self.stack.callback(process.kill)
        return process, log

    def owner(self, search: Search) -> Served:
        """The service that has leased a search."""
        pid = owner_of(self.database, search.id)
        return next(each for each in self.services if each.process.pid == pid)

    def crashes(self, *searches: Search) -> int:
        """The crashes that count against searches."""
        return sum(int(stored(self.database, each.id, "crashes")) for each in searches)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresDatabases) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        yield Site(folder, stack.enter_context(postgres.migrated()), stack)


def asked_layouts(service: Served, effort: str) -> Search:
    return service.client.submit_layouts({**LAYOUTS, "options": {"effort": effort}})


def begun_layouts(service: Served) -> Search:
    """A search for layouts that has found one, and waits."""
    search = asked_layouts(service, "thorough")
    wait_until(lambda: service.client.search(search.id).objective is not None, f"a result of {search.id}")
    return service.client.search(search.id)


def readiness(service: Served) -> httpx.Response:
    return httpx.get(f"{service.address}/readyz", timeout=60)


def ended_by_cancellation(client: Client, asked: Search) -> Search:
    """The end of a cancelled search, which has a plan."""
    ended = client.wait(asked.id, timeout=DEADLINE)
    assert ended.state == "cancelled"
    plan = client.plan(str(ended.plan_id))
    if ended.kind == "plan":
        verify(plan)
    return ended


def test_services_share_the_work_of_both_kinds(site: Site) -> None:
    wait_until(lambda: all(readiness(each).is_success for each in site.services), "readiness")
    one, other = site.services
    plan = one.client.submit(PROBLEM, {"effort": "standard", "seed": 1})
    layouts = asked_layouts(other, "standard")
    problem = parse_problem(PROBLEM)
    done = other.client.wait(plan.id, timeout=DEADLINE)
    assert done.plan_id == make_plan(problem, orders_of(problem), method="patient").plan_id
    done = one.client.wait(layouts.id, timeout=DEADLINE)
    assert done.answer == unpack(ranking(2).answer or b"")
    assert [event.kind for event in one.client.events(layouts.id)][-2:] == ["improvement", "end"]


def test_any_service_cancels_a_search_of_another_one_on_a_remote_worker(site: Site) -> None:
    running = begun(site.services[0].client, seed=2)
    other = next(each for each in site.services if each is not site.owner(running))
    other.client.cancel(running.id)
    assert ended_by_cancellation(other.client, running).attempts == 1


def test_killing_scheduler_worker_and_service_in_mid_search_loses_nothing(site: Site) -> None:
    first, second = site.services
    plan, layouts = before = [begun(first.client, seed=3), begun_layouts(second)]

    def states() -> list[str]:
        return sorted(first.client.search(found.id).state for found in before)

    def has_returned(search: Search) -> bool:
        return search.state == "queued" or search.attempts == 2

    # A worker that receives SIGTERM gives its search back; this is no crash. A service that does not know yet
    # that the other worker is occupied gives the search to that one, where it waits.
    site.workers[0].send_signal(signal.SIGTERM)
    wait_until(lambda: any(has_returned(first.client.search(found.id)) for found in before), "a return")
    assert site.crashes(*before) == 0

    # The scheduler, and with it the workers. This is no crash either; the services wait for another one.
    site.scheduler.send_signal(signal.SIGKILL)
    lost = "Searches wait: The Dask scheduler"
    wait_until(lambda: lost in readiness(first).text, "the loss of the scheduler")
    wait_until(lambda: states() == ["queued", "queued"], "the queue")
    assert site.crashes(*before) == 0
    site.start_scheduler()
    site.workers = [site.start_worker() for _ in range(2)]
    wait_until(lambda: states() == ["running", "running"], "the searches' return")

    # A service: the other one takes over its searches. A worker, and with it the search that it computes.
    victim = site.owner(plan)
    survivor = second if victim is first else first
    victim.process.send_signal(signal.SIGKILL)
    site.workers[0].send_signal(signal.SIGKILL)

    def is_back(found: Search) -> bool:
        is_ours = owner_of(site.database, found.id) == survivor.process.pid
        seen = survivor.client.search(found.id)
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
        assert (ended.objective or inf) <= (found.objective or 0) * (1 + 1e-9)
    assert site.crashes(*before) <= 1
    later = survivor.client.submit(PROBLEM, {"effort": "standard", "seed": 9})
    assert survivor.client.wait(later.id, timeout=DEADLINE).state == "done"
    assert "Traceback" not in survivor.log.read_text()
