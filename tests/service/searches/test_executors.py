"""Executors: the texts that name one, and searches on a Dask cluster from the side of the service."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Scheduler, Worker
from distributed.core import Status
from distributed.scheduler import KilledWorker
from pydantic import ValidationError
from support.fake_searches import orders_of, plan_of, stages_of
from support.serving import DEADLINE, PROBLEM
from zbv_service.documents.problems import pack, question_json
from zbv_service.records.searches import Claim, Update
from zbv_service.searches.executors.cluster import executor, worker
from zbv_service.searches.executors.cluster.computation import DaskComputation
from zbv_service.searches.executors.cluster.executor import DaskExecutor
from zbv_service.searches.executors.cluster.worker import Abandoned, Evicted, Found, OutOfMemory, Wanted
from zbv_service.searches.executors.local import LocalExecutor
from zbv_service.searches.executors.task import SearchCrashed, SearchEvicted, SearchLost, search_plan
from zbv_service.searches.runner import is_dead, make_executor, new_owner
from zbv_service.settings import ExecutorChoice, Settings, parse_choice
from zbv_solver.errors import ContradictedBound
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.incumbent import Progress


@dataclass
class Site:
    """A scheduler with one worker in this process, and the service's connection to it.

    ``exits`` is set when ``dask worker`` would exit after SIGTERM.
    """

    scheduler: Scheduler
    worker: Worker
    cluster: DaskExecutor
    exits: asyncio.Event


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(worker, "_leaving", threading.Event())
    monkeypatch.setattr(worker, "_is_full", threading.Event())
    monkeypatch.setattr(worker, "LEAVE_SECONDS", 0.1)
    # A look does not wait long for a worker. On a busy machine an answer may take longer.
    for name in ("LOOK_SECONDS", "CONNECT_SECONDS", "CALL_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(executor, name, DEADLINE)
    exits = asyncio.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: exits.set())
    async with (
        # Without a dashboard, a scheduler still has an HTTP server, and warns if its usual port is taken.
        Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard=False) as dask_worker,
    ):
        cluster = DaskExecutor(scheduler.address, None, patience=DEADLINE)
        await cluster.connect()
        yield Site(scheduler, dask_worker, cluster, exits)
        await cluster.disconnect("the test is over")
    signal.signal(signal.SIGTERM, before)


def leave(*_: Any) -> None:
    """The worker is in this process, and SIGTERM comes while it computes."""
    worker._leaving.set()


CLAIM = Claim("a", 1, b"", {}, None, 1, False)


def a_computation(updates: list[Update] | None = None, compute: Any = search_plan) -> DaskComputation:
    async def never(_computation: DaskComputation) -> object:
        raise AssertionError("nothing is computed here")

    taken = [] if updates is None else updates
    return DaskComputation(CLAIM, compute, taken.append, lambda: None, never)  # type: ignore[arg-type]


def on_worker(site: Site, compute: Any = search_plan) -> DaskComputation:
    """A search on the worker that does not react to a request to stop."""
    made = a_computation(compute=compute)
    (made.place,) = site.cluster._workers
    return made


@pytest.mark.parametrize(
    ("share", "received_signal", "kind"),
    [(0.2, True, SearchEvicted), (0.2, False, SearchCrashed), (0.9, True, SearchCrashed)],
    ids=["stopped", "died", "stopped-for-lack-of-memory"],
)
async def test_a_search_that_did_not_react_before_its_worker_was_gone_crashed_unless_the_worker_was_stopped(
    site: Site, monkeypatch: pytest.MonkeyPatch, share: float, received_signal: bool, kind: type[Exception]
) -> None:
    monkeypatch.setattr(worker, "_memory_in_use", lambda _: share)
    await site.cluster.look()
    computation = on_worker(site)
    site.cluster._computations[computation.token] = computation
    if received_signal:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(site.exits.wait(), DEADLINE)
    await site.scheduler.remove_worker(site.worker.address, stimulus_id="test", close=False)
    await site.cluster.look()
    assert type(computation.outcome.exception()) is kind


async def test_a_search_that_was_given_up_occupies_its_thread_until_it_stops(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another search would wait behind it in a queue of Dask."""
    deaf = SimpleNamespace(service=site.cluster._name, abandon=lambda: None)
    monkeypatch.setitem(worker._mailboxes, "given-up", deaf)
    await site.cluster.look()
    assert (site.cluster.shared_slots, site.cluster.slots) == (1, 0)
    monkeypatch.delitem(worker._mailboxes, "given-up")
    await site.cluster.look()
    assert (site.cluster.shared_slots, site.cluster.slots) == (1, 1)


async def test_a_worker_of_another_version_is_not_used_and_the_trouble_says_why(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.cluster._mine = {**worker.describe(), "zbv": "9.9.9"}
    await site.cluster.look()
    version = worker.describe()["zbv"]
    assert f"zbv is {version} and must be 9.9.9" in str(site.cluster.trouble)
    assert "is not used: zbv is" in caplog.text
    assert site.cluster.slots == 0


async def test_a_worker_that_gave_a_search_back_gets_no_other(site: Site) -> None:
    await site.cluster.look()
    assert site.cluster.slots == 1
    computation = on_worker(site, leave)
    with pytest.raises(worker.Evicted):
        await asyncio.wait_for(site.cluster._submit(computation), DEADLINE)
    assert site.cluster.slots == 0


def found(number: int, objective: float) -> Found:
    return Found(number, Update(objective, 1.0, "m", b""))


async def test_each_report_is_taken_once_even_if_another_process_restarts_the_numbers() -> None:
    updates: list[Update] = []
    computation = a_computation(updates)
    assert not computation.is_under_way
    for number, objective in ((3, 9.0), (3, 9.0), (5, 8.0)):
        computation.found("first", found(number, objective))
    # Dask moved it to another process, which resumes from the same incumbent.
    computation.found("second", found(1, 7.0))
    assert [update.objective for update in updates] == [9, 8, 7]
    assert (computation.wanted.seen, computation.is_under_way) == (1, True)


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (KilledWorker("task", None, 3), SearchCrashed, "each worker that computed it died"),  # type: ignore[arg-type]
        (OutOfMemory(), SearchCrashed, "ran out of memory"),
        (Evicted("its worker was stopped."), SearchEvicted, "was stopped"),
        (Abandoned("its service was silent."), SearchLost, "silent"),
        (ZeroDivisionError("of the search"), ZeroDivisionError, "of the search"),
        (ContradictedBound({}, 7.0, 8.0, "cp-sat"), ContradictedBound, "below the lower bound 8 (cp-sat)"),
    ],
)
async def test_the_error_of_a_dask_task_is_translated(
    raised: Exception, kind: type[Exception], says: str
) -> None:
    computation = a_computation()
    submitted: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    submitted.set_exception(raised)
    computation.take_outcome(submitted)  # type: ignore[arg-type]
    error = computation.outcome.exception()
    assert type(error) is kind
    assert says in str(error)


async def test_a_search_that_does_not_stop_is_given_up_as_a_crash_if_it_has_begun() -> None:
    computation = a_computation()
    computation.place = "a worker"
    computation.kill()
    with pytest.raises(SearchCrashed, match="did not stop"):
        await computation.outcome
    computation = a_computation()
    computation.kill()
    with pytest.raises(SearchLost, match="no worker has begun"):
        await computation.outcome


async def test_a_worker_says_that_it_refused_an_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "get_worker", lambda: SimpleNamespace(status=Status.running))
    seen: list[Update | None] = []

    def search(problem: Any, options: Any, on_progress: Any, cancelled: Any, incumbent: Any) -> Any:
        assert incumbent is None
        stages = stages_of(problem)
        on_progress(Progress(9.0, 4.0, 1.25, "m", 0.0, orders_of(stages), stages))
        held = asyncio.run(worker.exchange("service", {"token": Wanted(stop=False, seen=0)}))
        seen.append(held.searches["token"].update)
        return plan_of(stages)

    task = Claim("a", 1, pack(question_json(parse_any_problem(PROBLEM))), {}, pack([["0F0"], []]), 1, False)
    compute = partial(search_plan, search=search)
    plan: Any = await asyncio.to_thread(worker.run_on_worker, task, compute, "token", "service", 60.0)
    assert [plan.refusal] == [update and update.refusal for update in seen]
    assert "InvalidPlan" in plan.refusal.reason


def test_a_setting_names_an_executor() -> None:
    for text, choice in (
        ("processes", ExecutorChoice()),
        ("processes:3", ExecutorChoice(processes=3)),
        ("dask://scheduler:8786", ExecutorChoice(scheduler="tcp://scheduler:8786")),
        ("dask://[::1]:8786/", ExecutorChoice(scheduler="tcp://[::1]:8786")),
        ("tls://scheduler.example:8786", ExecutorChoice(scheduler="tls://scheduler.example:8786")),
    ):
        assert parse_choice(text) == choice
        assert Settings(executor=text).executor == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "threads", "processes:0", "processes:1025", "processes:two", "processes:²"),
        *("dask://", "dask://host", "dask://host:0", "dask://host:65536", "dask://user@host:1"),
        *("dask://a b:1", "tcp://host:1", "dask://host:1\n"),
    ],
)
def test_any_other_text_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="processes"):
        parse_choice(text)
    with pytest.raises(ValidationError, match="executor"):
        Settings(executor=text)


def test_the_number_of_slots_is_the_number_of_processes() -> None:
    for settings, slots in (
        (Settings(searches=3), 3),
        (Settings(executor="processes:2"), 2),
        (Settings(searches=3, executor="processes:2"), 2),
    ):
        made = make_executor(settings)
        assert isinstance(made, LocalExecutor)
        assert (made.slots, made.trouble) == (slots, None)


def test_only_owners_on_this_machine_are_known_to_be_dead() -> None:
    mine, living = new_owner(), new_owner(1)
    reborn, elsewhere = new_owner(), mine.replace("/", "-else/", 1)
    assert not is_dead(mine, mine)
    assert not is_dead(living, mine)
    assert is_dead(reborn, mine), "another runner with our process id was before us"
    assert not is_dead(elsewhere, mine)
    for rubbish in ("", ":", "a:b", f"{mine.rsplit(':', 2)[0]}:x:y"):
        assert not is_dead(rubbish, mine)


async def test_a_search_whose_process_was_not_started_when_the_service_stopped_is_lost_not_failed() -> None:
    processes = LocalExecutor(1, preload=False)
    await processes.start()
    computation = processes.expect(CLAIM, search_plan, lambda update: None)
    processes.kill()
    with pytest.raises(SearchLost, match="the service stopped before"):
        await computation.plan()
    await processes.stop()
