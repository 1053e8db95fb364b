"""The service's connection to a cluster: workers that end, and workers of other versions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Scheduler, Worker
from zbv_service.records.searches import Claim
from zbv_service.searches.executors.cluster import worker
from zbv_service.searches.executors.cluster.computation import DaskComputation
from zbv_service.searches.executors.cluster.connection import Cluster
from zbv_service.searches.executors.executor import SearchCrashed, SearchEvicted
from zbv_service.searches.executors.task import search_plan


@dataclass
class Site:
    """A scheduler with one worker in this process, and the service's connection to it.

    ``exits`` is set when ``dask worker`` would exit after SIGTERM.
    """

    scheduler: Scheduler
    worker: Worker
    cluster: Cluster
    exits: asyncio.Event


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(worker, "_leaving", threading.Event())
    monkeypatch.setattr(worker, "_is_full", threading.Event())
    monkeypatch.setattr(worker, "LEAVE_SECONDS", 0.1)
    exits = asyncio.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: exits.set())
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard=False) as dask_worker,
    ):
        cluster = await Cluster.connect(scheduler.address)
        yield Site(scheduler, dask_worker, cluster, exits)
        await cluster.close()
    signal.signal(signal.SIGTERM, before)


def leave(*_: Any) -> None:
    """The worker is in this process, and SIGTERM comes while it computes."""
    worker._leaving.set()


def a_computation(site: Site, compute: Any = search_plan) -> DaskComputation:
    """A search on the worker that does not react to a request to stop."""

    async def never(_computation: DaskComputation) -> object:
        raise AssertionError("nothing is computed here")

    claim = Claim("a", 1, b"", {}, None, 1, False)
    made = DaskComputation(claim, compute, lambda _: None, lambda: None, never)  # type: ignore[arg-type]
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
    await site.cluster.look({})
    computation = a_computation(site)
    if received_signal:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(site.exits.wait(), 30)
    await site.scheduler.remove_worker(site.worker.address, stimulus_id="test", close=False)
    await site.cluster.look({computation.token: computation})
    assert type(computation.outcome.exception()) is kind


async def test_a_search_that_was_given_up_occupies_its_thread_until_it_stops(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another search would wait behind it in a queue of Dask."""
    deaf = SimpleNamespace(service=site.cluster._name, abandon=lambda: None)
    monkeypatch.setitem(worker._mailboxes, "given-up", deaf)
    await site.cluster.look({})
    assert (site.cluster.threads, site.cluster.room) == (1, 0)
    monkeypatch.delitem(worker._mailboxes, "given-up")
    await site.cluster.look({})
    assert (site.cluster.threads, site.cluster.room) == (1, 1)


async def test_a_worker_of_another_version_is_not_used_and_the_trouble_says_why(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site.cluster._mine = {**worker.describe(), "zbv": "9.9.9"}
    while site.cluster.trouble == "The Dask cluster has no workers.":
        await site.cluster.look({})
    version = worker.describe()["zbv"]
    assert f"zbv is {version} and must be 9.9.9" in str(site.cluster.trouble)
    assert "is not used: zbv is" in caplog.text
    assert site.cluster.room == 0


async def test_a_worker_that_gave_a_search_back_gets_no_other(site: Site) -> None:
    await site.cluster.look({})
    assert site.cluster.room == 1
    computation = a_computation(site, leave)
    with pytest.raises(worker.Evicted):
        await asyncio.wait_for(site.cluster.submit(computation, 1.0), 30)
    assert site.cluster.room == 0
