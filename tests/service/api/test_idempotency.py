"""The header Idempotency-Key: a repeated request for a run runs only once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from support.serving import MODEL, PROBLEM, Service, Serving
from support.tokens import add

KEY = "8e03978e-40d5-43dd-bc93-6894a57f9324"


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


async def submit_run(service: Service, key: str | None = KEY, **more: Any) -> httpx.Response:
    body = {"plan_id": await service.import_plan(), "model": MODEL, "nodes": 2, "steps": 5, **more}
    headers = [] if key is None else [(b"Idempotency-Key", key.encode())]
    return await service.http.post("/v1/runs", json=body, headers=headers)


async def runs(service: Service) -> list[str]:
    return [run["id"] for run in await service.listed("runs")]


async def test_a_repeated_request_does_not_start_a_second_run(serving: Serving) -> None:
    async with serving("immediate") as service:
        first = await submit_run(service)
        assert first.status_code == 202
        run_id = first.json()["id"]
        await service.http.post(f"/v1/runs/{run_id}/cancel")
        again = await submit_run(service, f'"{KEY}"')
        assert (again.status_code, again.json()["id"], again.json()["state"]) == (202, run_id, "cancelled")
        assert kind(await submit_run(service, steps=6)) == (422, "invalid-parameter")
        assert await runs(service) == [run_id]
        assert kind(await submit_run(service, None, id="d" * 32)) == (422, "invalid-body"), (
            "the service chooses the id"
        )
        assert (await submit_run(service, None)).json()["id"] != run_id, "without a key, it is another run"
    async with serving("immediate") as service:
        assert (await submit_run(service)).json()["id"] == run_id, "the key survives a restart"


async def test_a_key_is_visible_text_of_up_to_255_characters_and_a_refused_run_does_not_use_it_up(
    service: Service,
) -> None:
    assert (await submit_run(service, "a" * 255)).status_code == 202
    for key in ("", "two words", "a" * 256, "\u00e9"):
        assert kind(await submit_run(service, key)) == (422, "invalid-parameter"), key
    assert kind(await submit_run(service, nodes=3)) == (422, "invalid-body")
    assert (await submit_run(service)).status_code == 202


async def test_each_token_has_its_own_keys(serving: Serving) -> None:
    async with serving("immediate", auth="tokens") as service:
        service.http.headers.update(await add(service, "admin", name="one"))
        first = (await submit_run(service)).json()["id"]
        assert (await submit_run(service)).json()["id"] == first
        service.http.headers.update(await add(service, "admin", name="two"))
        assert (await submit_run(service)).json()["id"] != first


async def test_concurrent_requests_with_one_key_create_one_run(serving: Serving) -> None:
    """Two services share the database, and the run is planned first."""
    async with serving("held") as one, serving("held") as two:
        asked = [submit_run(service, plan_id=None, problem=PROBLEM) for service in (one, two) * 5]
        answers = await asyncio.gather(*asked)
        assert await runs(one) == [*{answer.json()["id"] for answer in answers}]
