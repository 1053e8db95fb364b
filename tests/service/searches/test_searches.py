"""Searches over HTTP: accepted, shared, followed, cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.serving import PROBLEM, Service, Serving


async def test_a_search_is_accepted_and_ends_with_a_plan(service: Service) -> None:
    accepted = await service.submit()
    assert accepted.status_code == 202
    assert int(accepted.headers["retry-after"]) > 0
    body = accepted.json()
    assert body["state"] in ("queued", "running")
    assert accepted.headers["location"] == f"/v1/searches/{body['id']}"
    assert body["problem_summary"]["pp_degree"] == 2
    assert body["options"] == {
        "effort": "standard",
        "time_limit": None,
        "seed": 0,
        "jitter": None,
        "quantile": None,
    }

    done = await service.ended(body["id"])
    assert (done["state"], done["objective"], done["error"]) == ("done", 8, None)
    plan = await service.http.get(f"/v1/plans/{done['plan_id']}")
    assert plan.json()["plan_id"] == done["plan_id"]


async def test_a_done_search_answers_the_same_request_again(service: Service) -> None:
    first = (await service.submit()).json()
    await service.ended(first["id"])
    again = await service.submit()
    assert again.status_code == 200
    assert again.json()["id"] == first["id"]
    # The same problem, written differently: the normalised documents are equal.
    spelled = {**PROBLEM, "placement": "v", "objective": "span"}
    assert (await service.submit(spelled, effort="standard")).json()["id"] == first["id"]


async def test_other_options_are_another_search(serving: Serving) -> None:
    others: tuple[dict[str, Any], ...] = ({}, {"seed": 1}, {"effort": "quick"}, {"time_limit": 5.0})
    async with serving("immediate") as service:
        assert len({(await service.submit(**options)).json()["id"] for options in others}) == 4


async def test_a_search_for_jitter_stores_a_plan_with_its_simulation(serving: Serving) -> None:
    jitter = {"action": 0.05, "rank": 0.0, "transfer": {"samples": [1, 1.5]}}
    async with serving("solver") as service:
        submitted = await service.submit(effort="quick", jitter=jitter, quantile=0.9)
        assert submitted.json()["options"]["jitter"] == jitter
        done = await service.ended(submitted.json()["id"])
        assert done["options"]["jitter"] == jitter
        (listed,) = await service.listed("searches")
        assert listed == {**done, "options": {**done["options"], "jitter": None}}
        plan = await service.get(f"/v1/plans/{done['plan_id']}")
        assert plan["simulation"]["jitter"] == jitter
        assert plan["provenance"]["quantile"] == 0.9
        page = await service.http.get(f"/searches/{done['id']}", headers={"Accept": "text/html"})
        assert "0.9 quantile of the simulated time" in page.text


ONE = {"samples": [1]}


@pytest.mark.parametrize(
    ("options", "pointer"),
    [
        ({"quantile": 0.9}, "/options/quantile"),
        ({"jitter": {"action": 0.05}, "quantile": 0.3}, "/options/quantile"),
        ({"jitter": {"action": -1}}, "/options/jitter/action"),
        ({"jitter": {"rank": [0.1, 0.1, 0.1]}}, "/options/jitter/rank"),
        ({"jitter": "5%"}, "/options/jitter"),
        ({"jitter": {"transfer": {"samples": []}}}, "/options/jitter/transfer"),
        ({"jitter": {"rank": [{"samples": [1] * 10_000}] * 2, "transfer": ONE}}, "/options/jitter"),
        ({"jitter": {"action": {key: {"samples": [1] * 6_667} for key in "FIW"}}}, "/options/jitter"),
    ],
)
async def test_wrong_jitter_is_refused(service: Service, options: dict[str, Any], pointer: str) -> None:
    answer = await service.submit(**options)
    assert answer.status_code == 422
    assert any(issue["pointer"].startswith(pointer) for issue in answer.json()["errors"])


async def test_a_running_search_is_shared(held: Service, directory: Path) -> None:
    first = (await held.submit()).json()
    await held.until(first["id"], lambda found: found["state"] == "running")
    again = await held.submit()
    assert (again.status_code, again.json()["id"]) == (202, first["id"])
    (directory / "release").touch()
    await held.ended(first["id"])


async def test_many_equal_requests_at_once_are_one_search(service: Service) -> None:
    answers = await asyncio.gather(*(service.submit() for _ in range(20)))
    assert {answer.status_code for answer in answers} <= {200, 202}
    assert len({answer.json()["id"] for answer in answers}) == 1


async def test_progress_shows_while_a_search_runs(held: Service, directory: Path) -> None:
    search_id = (await held.submit()).json()["id"]
    seen = await held.until(search_id, lambda found: found["objective"] is not None)
    assert (seen["state"], seen["objective"], seen["lower_bound"], seen["gap"]) == ("running", 9, 4, 1.25)
    assert seen["method"] == "held"
    (directory / "release").touch()
    assert (await held.ended(search_id))["objective"] == 8


async def test_cancelling_keeps_the_best_plan_and_frees_the_request(held: Service) -> None:
    search_id = await held.begun()
    answer = await held.cancel(search_id)
    assert answer.status_code == 202
    assert answer.json()["cancel_requested"]
    cancelled = await held.ended(search_id)
    assert cancelled["state"] == "cancelled"
    plan = await held.http.get(f"/v1/plans/{cancelled['plan_id']}")
    assert plan.json()["provenance"]["method"] == "cancelled"

    again = await held.cancel(search_id)
    assert (again.status_code, again.json()) == (200, cancelled)
    anew = (await held.submit()).json()
    assert anew["id"] != search_id
    await held.http.post(f"/v1/searches/{anew['id']}/cancel")
    await held.ended(anew["id"])


async def test_a_queued_search_is_cancelled_immediately(serving: Serving, directory: Path) -> None:
    async with serving("held", searches=1) as service:
        running = (await service.submit()).json()["id"]
        await service.until(running, lambda found: found["state"] == "running")
        waiting = (await service.submit(seed=1)).json()["id"]
        answer = await service.cancel(waiting)
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert answer.json()["plan_id"] is None
        (directory / "release").touch()
        assert (await service.ended(running))["state"] == "done"


async def test_the_number_of_concurrent_searches_is_limited_and_they_start_in_order(
    serving: Serving, directory: Path
) -> None:
    async with serving("held", searches=2) as service:
        ids = [(await service.submit(seed=seed)).json()["id"] for seed in range(4)]
        for search_id in ids[:2]:
            await service.until(search_id, lambda found: found["objective"] is not None)
        assert [(await service.search(search_id))["state"] for search_id in ids[2:]] == ["queued"] * 2
        (directory / "release").touch()
        for search_id in ids:
            assert (await service.ended(search_id))["state"] == "done"


async def test_the_list_shows_the_newest_first(service: Service) -> None:
    ids = [(await service.submit(seed=seed)).json()["id"] for seed in range(3)]
    listed = await service.listed("searches")
    assert [entry["id"] for entry in listed] == ids[::-1]
    limited = (await service.http.get("/v1/searches", params={"limit": 1})).json()["searches"]
    assert [entry["id"] for entry in limited] == ids[-1:]


async def test_an_infeasible_memory_limit_ends_the_search_as_infeasible(serving: Serving) -> None:
    tight = {**PROBLEM, "memory": {**PROBLEM["memory"], "static": [0, 1], "limit": [2, 2.5]}}
    async with serving("immediate") as service:
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


async def test_a_queued_search_reports_its_position(serving: Serving, directory: Path) -> None:
    async with serving("held", searches=1) as service:
        ids = [(await service.submit({**PROBLEM, "microbatches": m})).json()["id"] for m in (2, 3, 4)]
        await service.until(ids[0], lambda found: found["state"] == "running")
        assert [(await service.search(each))["queued_before"] for each in ids] == [None, 0, 1]
        (directory / "release").touch()
        for each in ids:
            assert (await service.ended(each))["queued_before"] is None
