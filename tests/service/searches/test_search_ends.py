"""Cancelling keeps the best plan in every state; discarding removes a search but not its plan."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from support.serving import DEADLINE, PROBLEM, Service, Serving
from zbv_service.database import Database, SearchTable
from zbv_service.settings import Settings

RUN = {"problem": PROBLEM, "model": {"factory": "a:b"}, "nodes": 1, "steps": 1}


async def running(service: Service, **options: int) -> str:
    """A search that runs and has found a plan."""
    search_id: str = (await service.submit(**options)).json()["id"]
    await service.until(search_id, lambda found: found["objective"] is not None)
    return search_id


async def planned(service: Service, run_id: str) -> dict[str, Any]:
    """Wait until a run has its plan."""
    deadline = time.monotonic() + DEADLINE
    while True:
        run: dict[str, Any] = await service.get(f"/v1/runs/{run_id}")
        if run["state"] != "planning":
            return run
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def cancel(service: Service, search_id: str) -> int:
    return (await service.cancel(search_id)).status_code


async def discard(service: Service, search_id: str) -> int:
    return (await service.http.delete(f"/v1/searches/{search_id}")).status_code


async def test_any_service_can_cancel_a_search_of_another_service(serving: Serving, directory: Path) -> None:
    async with serving("held", heartbeat_seconds=4.0) as runs:
        search_id = await running(runs)
        async with serving("held") as asked:
            assert await cancel(asked, search_id) == 202
            ended = await asked.ended(search_id)
            assert (ended["state"], ended["objective"]) == ("cancelled", 8)
            assert (await asked.http.get(f"/v1/plans/{ended['plan_id']}")).status_code == 200


async def test_a_cancelled_search_with_an_incumbent_does_not_wait_for_a_free_slot(
    serving: Serving, settings: Settings
) -> None:
    async with serving("held") as service:
        waiting = await running(service, seed=1)
    # Its service has stopped and requeued it; another search uses the only slot.
    database = Database(settings.database)
    table = SearchTable(database)
    claim = await table.claim("elsewhere:1:x", 3600)
    assert claim is not None
    async with serving("held", searches=1) as service:
        busy = await running(service, seed=2)
        await table.requeue(claim.id, claim.fence, None)
        assert (await service.search(waiting))["state"] == "queued"
        assert await cancel(service, waiting) == 202
        ended = await service.ended(waiting)
        assert ended["state"] == "cancelled"
        assert ended["plan_id"] is not None
        assert (await service.search(busy))["state"] == "running"
        await cancel(service, busy)
    await database.close()


async def test_cancelling_an_ended_search_changes_nothing(service: Service) -> None:
    search_id = (await service.submit()).json()["id"]
    done = await service.ended(search_id)
    answer = await service.cancel(search_id)
    assert (answer.status_code, answer.json()) == (200, done)
    assert (await service.submit()).json()["id"] == search_id  # it still answers the request
    for unknown in ("0" * 32, "nothing", "%00", "a" * 5000):
        assert await cancel(service, unknown) == 404
        assert await discard(service, unknown) == 404


async def test_a_running_search_is_stopped_and_forgotten(serving: Serving, directory: Path) -> None:
    async with serving("held", searches=1) as service:
        search_id = await running(service)
        next_one = (await service.submit(seed=1)).json()["id"]
        assert await discard(service, search_id) == 204
        assert await discard(service, search_id) == 404
        for path in ("", "/events"):
            assert (await service.http.get(f"/v1/searches/{search_id}{path}")).status_code == 404
        listed = await service.listed("searches")
        assert [entry["id"] for entry in listed] == [next_one]
        # Its slot is free, so it has stopped; the plan that it returned then is not stored.
        await service.until(next_one, lambda found: found["objective"] is not None)
        assert await service.listed("plans") == []
        anew = await service.submit()
        assert (anew.status_code, anew.json()["id"] != search_id) == (202, True)
        for seed in (0, 1):
            await cancel(service, (await service.submit(seed=seed)).json()["id"])


async def test_a_search_of_another_service_stops_when_it_is_discarded(
    serving: Serving, directory: Path
) -> None:
    async with serving("held", searches=1) as runs:
        search_id = await running(runs)
        async with serving("held", searches=1) as asked:
            assert await discard(asked, search_id) == 204
        next_one = await runs.begun(seed=1)
        await cancel(runs, next_one)


async def test_the_plan_of_a_discarded_search_stays(service: Service) -> None:
    ended = await service.done()
    assert await discard(service, ended["id"]) == 204
    assert (await service.http.get(f"/v1/plans/{ended['plan_id']}")).status_code == 200
    again = (await service.submit()).json()
    assert again["id"] != ended["id"]
    assert (await service.ended(again["id"]))["plan_id"] == ended["plan_id"]


async def test_a_search_that_a_run_waits_for_cannot_be_discarded(held: Service, directory: Path) -> None:
    run = (await held.http.post("/v1/runs", json=RUN)).json()
    search_id = run["search_id"]
    refused = await held.http.delete(f"/v1/searches/{search_id}")
    assert (refused.status_code, refused.json()["type"]) == (409, "/errors/search-in-use")
    assert run["id"] in refused.json()["detail"]
    (directory / "release").touch()
    await held.ended(search_id)
    seen = await planned(held, run["id"])
    # A run with a plan no longer needs its search.
    assert await discard(held, search_id) == 204
    after = await held.get(f"/v1/runs/{run['id']}")
    assert (after["plan_id"], after["search_id"]) == (seen["plan_id"], None)
    await held.http.post(f"/v1/runs/{run['id']}/cancel")


async def test_discarding_during_a_repeated_submission_never_fails(service: Service) -> None:
    for _ in range(5):
        search_id = (await service.submit()).json()["id"]
        answers = await asyncio.gather(
            service.http.delete(f"/v1/searches/{search_id}"),
            *(service.submit() for _ in range(4)),
            service.http.delete(f"/v1/searches/{search_id}"),
            service.http.get(f"/v1/searches/{search_id}/events", params={"after": 0}),
        )
        assert {answer.status_code for answer in answers} <= {200, 202, 204, 404}
