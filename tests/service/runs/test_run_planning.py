"""Runs submitted as a problem: planned first, across restarts of the service, and cancelled at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from support.serving import MODEL, PROBLEM, Service, Serving


async def submit_problem(service: Service, problem: Any = PROBLEM, **more: Any) -> httpx.Response:
    body = {"problem": problem, "model": MODEL, "nodes": 2, "steps": 5}
    return await service.http.post("/v1/runs", json={**body, **more})


async def test_a_run_waits_for_its_plan_and_then_for_its_agents(held: Service, directory: Path) -> None:
    answer = await submit_problem(held, search_options={"effort": "quick", "seed": 7})
    run = answer.json()
    assert (answer.status_code, run["state"], run["plan_id"]) == (202, "planning", None)
    assert (run["nodes"], run["ranks_per_node"]) == (2, 1)
    search = await held.search(run["search_id"])
    assert (search["options"]["effort"], search["options"]["seed"]) == ("quick", 7)
    (directory / "release").touch()
    found = await held.until_run(run["id"], lambda seen: seen["state"] == "waiting")
    assert found["plan_id"] == (await held.search(run["search_id"]))["plan_id"]
    agents = [await held.register(digit) for digit in "ab"]
    assert {(await held.work(agent))["plan_id"] for agent in agents} == {found["plan_id"]}
    kinds = [event["kind"] for event in await held.events_of_run(run["id"])]
    assert kinds == ["planning", "planned", "waiting", "starting"]


async def test_planning_continues_after_a_restart(serving: Serving, directory: Path) -> None:
    async with serving("held", shutdown_seconds=0.5) as service:
        run_id = (await submit_problem(service)).json()["id"]
    (directory / "release").touch()
    async with serving("held") as service:
        assert (await service.until_run(run_id, lambda seen: seen["state"] == "waiting"))["plan_id"]


async def test_a_finished_search_is_reused(service: Service) -> None:
    search = await service.done()
    run = (await submit_problem(service)).json()
    assert run["search_id"] == search["id"]
    found = await service.until_run(run["id"], lambda seen: seen["state"] == "waiting")
    assert found["plan_id"] == search["plan_id"]


async def test_a_failed_search_fails_the_run_with_its_error(serving: Serving) -> None:
    async with serving("broken") as service:
        run = (await submit_problem(service)).json()
        found = await service.until_run(run["id"], lambda seen: seen["state"] == "failed")
        assert found["error"]["detail"] == (await service.search(run["search_id"]))["error"]["detail"]


async def test_a_search_cancelled_without_a_plan_fails_the_run(serving: Serving) -> None:
    async with serving("held", searches=1) as service:
        other = {**PROBLEM, "microbatches": 3}
        first = await service.until((await service.submit()).json()["id"], lambda seen: seen["objective"])
        run = (await submit_problem(service, other)).json()  # queued behind the first
        await service.http.post(f"/v1/searches/{run['search_id']}/cancel")
        found = await service.until_run(run["id"], lambda seen: seen["state"] == "failed")
        assert "was cancelled before it found one" in found["error"]["detail"]
        await service.http.post(f"/v1/searches/{first['id']}/cancel")


async def test_cancelling_a_run_cancels_its_search_unless_others_use_it(held: Service) -> None:
    run = (await submit_problem(held)).json()
    answer = await held.http.post(f"/v1/runs/{run['id']}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert (await held.ended(run["search_id"]))["state"] == "cancelled"

    others = await held.submit({**PROBLEM, "microbatches": 3})
    shared = (await submit_problem(held, {**PROBLEM, "microbatches": 3})).json()
    assert shared["search_id"] == others.json()["id"]
    await held.http.post(f"/v1/runs/{shared['id']}/cancel")
    assert (await held.run(shared["id"]))["state"] == "cancelled"
    assert not (await held.search(shared["search_id"]))["cancel_requested"]
    await held.http.post(f"/v1/searches/{shared['search_id']}/cancel")


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"problem": None}, "/plan_id"),
    ({"plan_id": "0" * 64}, "/plan_id"),
    ({"problem": {**PROBLEM, "microbatches": 0}}, "/problem/microbatches"),
    ({"problem": {**PROBLEM, "costs": {**PROBLEM["costs"], "p2p": [1]}}}, "/problem/costs/p2p"),
    ({"search_options": {"effort": "lazy"}}, "/search_options/effort"),
    ({"search_options": {"time_limit": 1e9}}, "/search_options/time_limit"),
    ({"nodes": 3}, "/nodes"),
)


async def test_a_wrong_problem_or_option_is_refused_with_a_pointer(service: Service) -> None:
    for changes, pointer in WRONG:
        answer = await submit_problem(service, **changes)
        assert answer.status_code == 422, answer.text
        assert [entry["pointer"] for entry in answer.json()["errors"]] == [pointer]
    assert await service.listed("runs") == []
    assert await service.listed("searches") == []


async def test_a_waiting_run_can_change_its_plan(held: Service, directory: Path) -> None:
    plan_id = await held.import_plan()
    run = (await submit_problem(held)).json()
    early = await held.http.post(f"/v1/runs/{run['id']}/plan", json={"plan_id": plan_id})
    assert (early.status_code, early.json()["type"]) == (409, "/errors/run-state")
    waiting = (await held.submit_run()).json()["id"]
    other = {**PROBLEM, "costs": {**PROBLEM["costs"], "p2p": 2}}
    another = await held.import_plan(other)
    changed = await held.http.post(f"/v1/runs/{waiting}/plan", json={"plan_id": another})
    assert (changed.status_code, changed.json()["plan_id"]) == (202, another)
    assert changed.json()["target_plan_id"] is None
    await held.http.post(f"/v1/runs/{run['id']}/cancel")
