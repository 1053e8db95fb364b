"""A service on PostgreSQL pauses for longer than its leases: another one takes its search over."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.databases import PostgresDatabases
from support.processes import is_alive, wait_until
from support.served import Served, begun, owner_of, start_services
from support.serving import DEADLINE
from zbv_service.client import Event
from zbv_solver.verify.verifier import verify


@pytest.fixture
def database(postgres: PostgresDatabases) -> Iterator[str]:
    with postgres.migrated() as url:
        yield url


@pytest.fixture
def services(database: str, tmp_path: Path) -> Iterator[list[Served]]:
    """Two services with one slot for searches each."""
    settings = {"ZBV_AUTH": "none", "ZBV_DATABASE": database, "ZBV_SEARCHES": "1"}
    times = {"ZBV_LEASE_SECONDS": "6.0", "ZBV_HEARTBEAT_SECONDS": "0.5"}
    with ExitStack() as stack:
        yield start_services(stack, tmp_path, 2, variables=settings | times)


def test_a_search_of_a_paused_service_continues_in_another_one_and_ends_once(
    services: list[Served], database: str
) -> None:
    def owner(search_id: str) -> int | None:
        return owner_of(database, search_id)

    first = begun(services[0].client).id
    paused, other = sorted(services, key=lambda service: service.process.pid != owner(first))
    searching = paused.children[-1]
    with ThreadPoolExecutor(1) as threads:
        # Who follows a search at the paused service sees the same events as everybody else.
        events: list[Event] = []

        def follow() -> None:
            for event in paused.client.events(first):
                events.append(event)

        followed = threads.submit(follow)
        wait_until(lambda: len(events) == 3, "a follower of the first attempt")
        paused.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: owner(first) == other.process.pid, "another owner")
        wait_until(lambda: other.client.search(first).attempts == 2, "another attempt")
        assert is_alive(searching), "it does not know yet"

        paused.process.send_signal(signal.SIGCONT)
        # What the search process of the paused service returns is late.
        wait_until(lambda: f"search {first} now belongs to another" in paused.log.read_text(), "the fence")
        assert (other.client.search(first).state, owner(first)) == ("running", other.process.pid)

        # The other service has no free slot, so the paused one computes the next search.
        second = begun(other.client, seed=2).id
        assert owner(second) == paused.process.pid
        assert paused.children[-1] == searching, "the late search still has its process"

        for search_id, service in ((first, paused), (second, other)):
            service.client.cancel(search_id)
            assert service.client.wait(search_id, timeout=DEADLINE).state == "cancelled"
        followed.result(DEADLINE)
    assert events == list(other.client.events(first))
    kinds = [event.data.get("reason", event.kind) for event in events]
    assert kinds[:4] == ["submitted", "started", "improvement", "service-lost"]
    assert kinds[4:] == ["started", "cancel-requested", "end"]
    ended = other.client.search(first)
    verify(other.client.plan(str(ended.plan_id)))
    assert ended.plan_id == other.client.search(second).plan_id, "it is stored once"
    for service in services:
        assert [line for line in service.log.read_text().splitlines() if "Traceback" in line] == []
