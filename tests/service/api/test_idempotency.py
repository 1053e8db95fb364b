"""The header Idempotency-Key: a repeated request runs only once, for searches and runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runs_over_http import MODEL, import_plan
from support.serving import PROBLEM, Service, Serving
from support.tokens import add

pytestmark = pytest.mark.anyio

KEY = "8e03978e-40d5-43dd-bc93-6894a57f9324"


async def submit(service: Service, *keys: str, **options: Any) -> httpx.Response:
    headers = [("Idempotency-Key", key) for key in keys]
    body = {"problem": PROBLEM, "options": options}
    return await service.http.post("/v1/searches", json=body, headers=headers)


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


async def test_a_repeated_request_returns_the_same_search_in_any_state(
    serving: Serving, directory: Path
) -> None:
    async with serving("held") as service:
        first = await submit(service, KEY)
        assert first.status_code == 202
        search_id = first.json()["id"]
        again = await submit(service, KEY)
        assert (again.status_code, again.json()["id"]) == (202, search_id)
        await service.http.post(f"/v1/searches/{search_id}/cancel")
        await service.ended(search_id)
        cancelled = await submit(service, f'"{KEY}"')  # quoted, as in the draft
        assert (cancelled.status_code, cancelled.json()["id"]) == (200, search_id)
        assert cancelled.json()["state"] == "cancelled"
        # Without the key it is a new request, and the cancelled search no longer answers it.
        (directory / "release").touch()
        other = (await service.submit()).json()
        assert other["id"] != search_id
        await service.http.delete(f"/v1/searches/{search_id}")
        assert kind(await submit(service, KEY)) == (410, "search-discarded")


async def test_a_key_survives_a_restart(serving: Serving) -> None:
    async with serving("immediate") as service:
        search_id = (await submit(service, KEY)).json()["id"]
        await service.ended(search_id)
    async with serving("immediate") as service:
        assert (await submit(service, KEY)).json()["id"] == search_id


async def test_the_same_key_with_another_body_is_refused(serving: Serving) -> None:
    async with serving("immediate") as service:
        search_id = (await submit(service, KEY)).json()["id"]
        for key in (KEY, f'"{KEY}"'):
            assert kind(await submit(service, key, seed=1)) == (422, "idempotency-key-reused")
        # The same JSON in another spelling.
        headers = {"Idempotency-Key": KEY, "content-type": "application/json"}
        spelled = httpx.Request("POST", "http://zbv", json={"options": {}, "problem": PROBLEM}).content
        same = await service.http.post("/v1/searches", content=spelled.replace(b":", b" : "), headers=headers)
        assert same.json()["id"] == search_id
        listed = (await service.http.get("/v1/searches")).json()["searches"]
        assert [entry["id"] for entry in listed] == [search_id]


async def test_a_refused_search_does_not_use_up_its_key(serving: Serving) -> None:
    async with serving("immediate") as service:
        assert kind(await submit(service, KEY, effort="none")) == (422, "invalid-body")
        assert (await submit(service, KEY)).status_code == 202


async def test_a_key_of_a_request_in_progress_is_a_conflict(serving: Serving) -> None:
    async with serving("immediate") as service:
        searches = service.app.state.application.searches
        answers = await asyncio.gather(*(submit(service, KEY) for _ in range(10)))
        accepted = [answer for answer in answers if answer.is_success]
        assert len({answer.json()["id"] for answer in accepted}) == 1
        # The others arrived while the first one was being read.
        assert {kind(answer) for answer in answers if answer.is_error} == {(409, "idempotency-key-in-use")}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in answers if answer.is_error)
        assert (await submit(service, KEY)).json()["id"] == accepted[0].json()["id"]
        assert searches._names._in_flight == set()


async def test_a_key_is_visible_text_of_up_to_255_characters(serving: Serving) -> None:
    async with serving("immediate") as service:
        for seed, key in enumerate(("a", "a" * 255, '"with space, comma; and \\" quote"')):
            assert (await submit(service, key, seed=seed)).status_code == 202, key
        for keys in (
            ["a" * 256],
            [""],
            ['""'],
            ["two words"],
            ["a, b"],
            ["half\\"],
            ['"open'],
            ['"a";v=1'],
            ["a", "a"],
        ):
            answer = await submit(service, *keys)
            assert kind(answer) == (400, "invalid-idempotency-key"), keys
            assert "UUID" in answer.json()["detail"] or "send one" in answer.json()["detail"], keys


async def submit_run(service: Service, key: str | None = KEY, **more: Any) -> httpx.Response:
    body = {"plan_id": await import_plan(service), "model": MODEL, "nodes": 2, "steps": 5, **more}
    headers = {} if key is None else {"Idempotency-Key": key}
    return await service.http.post("/v1/runs", json=body, headers=headers)


async def runs(service: Service) -> list[str]:
    return [run["id"] for run in (await service.http.get("/v1/runs")).json()["runs"]]


async def test_a_repeated_request_does_not_start_a_second_run(serving: Serving) -> None:
    async with serving("immediate") as service:
        first = await submit_run(service)
        assert first.status_code == 202
        run_id = first.json()["id"]
        await service.http.post(f"/v1/runs/{run_id}/cancel")
        again = await submit_run(service, f'"{KEY}"')
        assert (again.status_code, again.json()["id"], again.json()["state"]) == (202, run_id, "cancelled")
        assert kind(await submit_run(service, steps=6)) == (422, "idempotency-key-reused")
        assert await runs(service) == [run_id]
        assert kind(await submit_run(service, None, id="d" * 32)) == (422, "invalid-body"), (
            "the service chooses the id"
        )
        assert (await submit_run(service, None)).json()["id"] != run_id, "without a key, it is another run"
    async with serving("immediate") as service:
        assert (await submit_run(service)).json()["id"] == run_id, "the key survives a restart"


async def test_a_key_is_valid_for_one_route_only(serving: Serving) -> None:
    async with serving("immediate") as service:
        assert (await submit(service, KEY)).status_code == 202
        assert kind(await submit_run(service)) == (422, "idempotency-key-reused")
        assert (await submit_run(service, "other")).status_code == 202
        assert kind(await submit(service, "other")) == (422, "idempotency-key-reused")
        assert len(await runs(service)) == 1


async def test_each_token_has_its_own_keys(serving: Serving) -> None:
    async with serving("immediate", auth="tokens") as service:
        service.http.headers.update(await add(service, "admin", name="one"))
        first = (await submit_run(service)).json()["id"]
        assert (await submit_run(service)).json()["id"] == first
        service.http.headers.update(await add(service, "admin", name="two"))
        assert (await submit_run(service)).json()["id"] != first


async def test_a_refused_run_does_not_use_up_its_key(serving: Serving) -> None:
    async with serving("immediate") as service:
        assert kind(await submit_run(service, nodes=3)) == (422, "invalid-body")
        assert kind(await submit_run(service, problem=PROBLEM)) == (422, "invalid-body")
        assert (await submit_run(service)).status_code == 202


@pytest.mark.parametrize("what", ["plan", "problem"])
async def test_concurrent_requests_with_one_key_create_one_run(serving: Serving, what: str) -> None:
    """Two services share the database."""
    changes: dict[str, Any] = {} if what == "plan" else {"plan_id": None, "problem": PROBLEM}
    async with serving("held") as one, serving("held") as two:
        asked = [submit_run(service, **changes) for service in (one, two) * 5]
        answers = await asyncio.gather(*asked)
        accepted = [answer for answer in answers if answer.is_success]
        assert len({answer.json()["id"] for answer in accepted}) == 1
        assert {kind(answer) for answer in answers if answer.is_error} <= {(409, "idempotency-key-in-use")}
        assert await runs(one) == [accepted[0].json()["id"]]
