"""Searches over HTTP: accepted, shared, cancelled, discarded, and none is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.serving import PROBLEM, Service, Serving
from support.stored import next_of
from zbv_service.database import Database, SearchTable


async def test_a_search_is_accepted_and_ends_with_a_plan(service: Service) -> None:
    accepted = await service.submit()
    assert accepted.status_code == 202
    assert int(accepted.headers["retry-after"]) > 0
    body = accepted.json()
    assert body["state"] in ("queued", "running")
    assert accepted.headers["location"] == f"/v1/searches/{body['id']}"
    assert body["problem_summary"]["pp_degree"] == 2
    given = {"effort": "standard", "time_limit": None, "seed": 0, "jitter": None, "quantile": None}
    assert body["options"] == given
    done = await service.ended(body["id"])
    assert (done["state"], done["objective"], done["error"]) == ("done", 8, None)
    assert (await service.get(f"/v1/plans/{done['plan_id']}"))["plan_id"] == done["plan_id"]


async def test_equal_requests_are_one_search_before_and_after_its_end(service: Service) -> None:
    answers = await asyncio.gather(*(service.submit() for _ in range(20)))
    assert {answer.status_code for answer in answers} <= {200, 202}
    (search_id,) = {answer.json()["id"] for answer in answers}
    done = await service.ended(search_id)
    # The same problem, written differently: the normalised documents are equal.
    again = await service.submit({**PROBLEM, "placement": "v", "objective": "span"}, effort="standard")
    assert (again.status_code, again.json()["id"]) == (200, search_id)
    others: tuple[dict[str, Any], ...] = ({}, {"seed": 1}, {"effort": "quick"}, {"time_limit": 5.0})
    assert len({(await service.submit(**options)).json()["id"] for options in others}) == 4
    answer = await service.cancel(search_id)
    assert (answer.status_code, answer.json()) == (200, done), "it has ended"


async def test_the_newest_name_is_that_of_the_search_and_of_its_plan(service: Service) -> None:
    async def submitted(**more: Any) -> dict[str, Any]:
        answer = await service.http.post("/v1/searches", json={"problem": PROBLEM, **more})
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    first = await submitted(name="  Größe 1 ")
    assert first["name"] == "Größe 1"
    ended = await service.ended(first["id"])
    for more, name in (({}, "Größe 1"), ({"name": "two"}, "two"), ({"name": None}, "two")):
        again = await submitted(**more)
        assert (again["id"], again["name"]) == (first["id"], name)
        assert (await service.search(first["id"]))["name"] == name
    for address in ("/v1/searches", "/v1/plans"):
        for text, count in (("WO", 1), ("other", 0)):
            key = address.removeprefix("/v1/")
            found = (await service.get(address, q=text))[key]
            assert [each["name"] for each in found] == ["two"] * count
    for page in (f"/searches/{first['id']}", f"/plans/{ended['plan_id']}", "/searches", "/plans", "/"):
        assert "two" in (await service.http.get(page)).text


async def test_a_name_is_a_short_line_of_printable_characters(service: Service) -> None:
    for name in ("", "  ", "two\nlines", "\u202egnp.exe", "\x1b[1m", "x" * 101, 5):
        for answer in (
            await service.http.post("/v1/searches", json={"problem": PROBLEM, "name": name}),
            await service.submit_run(name=name),
        ):
            assert answer.status_code == 422, name
            assert [error["pointer"] for error in answer.json()["errors"]] == ["/name"], name


async def test_a_search_for_jitter_stores_a_plan_with_its_simulation(serving: Serving) -> None:
    jitter = {"action": 0.05, "rank": 0.0, "transfer": {"samples": [1, 1.5]}}
    async with serving("solver") as service:
        done = await service.done(effort="quick", jitter=jitter, quantile=0.9)
        assert done["options"]["jitter"] == jitter
        (listed,) = await service.listed("searches")
        assert listed == {**done, "options": {**done["options"], "jitter": None}}
        plan = await service.get(f"/v1/plans/{done['plan_id']}")
        assert (plan["simulation"]["jitter"], plan["provenance"]["quantile"]) == (jitter, 0.9)
        assert "0.9 quantile of the simulated time" in await service.page(f"/searches/{done['id']}")


async def test_cancelling_keeps_the_best_plan_and_frees_the_request(held: Service) -> None:
    search_id = await held.begun()
    again = await held.submit()
    assert (again.status_code, again.json()["id"]) == (202, search_id)
    answer = await held.cancel(search_id)
    assert (answer.status_code, answer.json()["cancel_requested"]) == (202, True)
    cancelled = await held.ended(search_id)
    assert cancelled["state"] == "cancelled"
    plan = await held.get(f"/v1/plans/{cancelled['plan_id']}")
    assert plan["provenance"]["method"] == "cancelled"
    assert (await held.submit()).json()["id"] != search_id


async def test_a_queued_search_has_a_position_and_is_cancelled_immediately(
    serving: Serving, directory: Path
) -> None:
    async with serving("held", searches=1) as service:
        ids = [await service.begun()]
        ids += [(await service.submit(seed=seed)).json()["id"] for seed in (1, 2)]
        assert [(await service.search(each))["queued_before"] for each in ids] == [None, 0, 1]
        answer = await service.cancel(ids[2])
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert answer.json()["plan_id"] is None
        (directory / "release").touch()
        for each in ids[:2]:
            ended = await service.ended(each)
            assert (ended["state"], ended["queued_before"]) == ("done", None)


async def test_an_infeasible_memory_limit_ends_the_search_as_infeasible(service: Service) -> None:
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "static": [0, 1], "limit": [2, 2.5]}}
    search_id = (await service.submit(tight)).json()["id"]
    ended = await service.ended(search_id)
    assert (ended["state"], ended["plan_id"]) == ("infeasible", None)
    error = ended["error"]
    assert error["type"] == "/errors/infeasible-memory"
    assert error["smallest_limit"] == [2, 3]
    assert [entry["pointer"] for entry in error["errors"]] == ["/problem/memory/limit"]
    assert "rank 1" in error["detail"]
    again = await service.submit(tight)
    assert (again.status_code, again.json()["id"]) == (200, search_id)


async def test_a_failed_search_reports_its_error_and_can_be_submitted_again(serving: Serving) -> None:
    async with serving("broken") as service:
        search_id = (await service.submit()).json()["id"]
        ended = await service.ended(search_id)
        assert ended["state"] == "failed"
        assert ended["error"]["type"] == "/errors/internal-error"
        assert "secret" not in str(ended)
        again = await service.submit()
        assert again.json()["id"] != search_id
        await service.ended(again.json()["id"])


async def discard(service: Service, search_id: str) -> int:
    return (await service.http.delete(f"/v1/searches/{search_id}")).status_code


async def test_a_cancelled_search_with_an_incumbent_does_not_wait_for_a_free_slot(
    serving: Serving, elsewhere: Database
) -> None:
    async with serving("held") as service:
        waiting = await service.begun(seed=1)
    # Its service has stopped and requeued it; another search uses the only slot.
    table = SearchTable(elsewhere)
    claim = await next_of(table, "elsewhere:1:x", 3600)
    async with serving("held", searches=1) as service:
        busy = await service.begun(seed=2)
        await table.requeue(claim.id, claim.fence, None)
        assert (await service.search(waiting))["state"] == "queued"
        assert (await service.cancel(waiting)).status_code == 202
        ended = await service.ended(waiting)
        assert (ended["state"], ended["plan_id"] is None) == ("cancelled", False)
        assert (await service.search(busy))["state"] == "running"


async def test_a_running_search_is_stopped_and_forgotten(serving: Serving) -> None:
    async with serving("held", searches=1) as service:
        search_id = await service.begun()
        next_one = (await service.submit(seed=1)).json()["id"]
        assert await discard(service, search_id) == 204
        assert await discard(service, search_id) == 404
        for path in ("", "/events"):
            assert (await service.http.get(f"/v1/searches/{search_id}{path}")).status_code == 404
        # Its slot is free, so it has stopped; the plan that it returned then is not stored.
        await service.until(next_one, lambda found: found["objective"] is not None)
        assert await service.listed("plans") == []
        await service.cancel(next_one)


async def test_a_search_that_a_run_waits_for_cannot_be_discarded(held: Service, directory: Path) -> None:
    run = (await held.submit_run(plan_id=None, problem=PROBLEM)).json()
    search_id = run["search_id"]
    refused = await held.http.delete(f"/v1/searches/{search_id}")
    assert (refused.status_code, refused.json()["type"]) == (409, "/errors/conflict")
    assert run["id"] in refused.json()["detail"]
    (directory / "release").touch()
    await held.ended(search_id)
    seen = await held.until_run(run["id"], lambda found: found["state"] != "planning")
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
