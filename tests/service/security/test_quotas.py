"""What a token may store: beyond its limits it is refused with what to remove, and others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.serving import MODEL, PROBLEM, Service, Serving
from support.stored import a_plan, a_search
from zbv_service.database import Database, PlanTable, SearchTable
from zbv_service.security import quotas
from zbv_service.security.quotas import Quotas
from zbv_service.security.tokens import Grant
from zbv_service.settings import Settings


@pytest.fixture(autouse=True)
def count_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "FRESH_SECONDS", (1e-6, 1e-6))


def refusal(answer: httpx.Response) -> str:
    """The detail of a refusal."""
    assert answer.status_code == 429, answer.text
    document = answer.json()
    assert document["type"].endswith("/errors/too-much-stored")
    assert "retry-after" not in answer.headers  # waiting does not help
    return str(document["detail"])


def problem(microbatches: int) -> dict[str, Any]:
    return {**PROBLEM, "microbatches": microbatches}


async def test_searches_beyond_the_limit_are_refused_until_some_are_discarded(serving: Serving) -> None:
    async with serving("immediate", max_stored_rows_per_token=2) as service:
        first = (await service.submit(problem(3))).json()["id"]
        await service.ended(first)
        await service.submit(problem(4))
        assert "DELETE /v1/searches/" in refusal(await service.submit(problem(5)))
        assert (await service.http.delete(f"/v1/searches/{first}")).status_code == 204
        assert (await service.submit(problem(5))).status_code in (201, 202)


async def test_bytes_of_searches_and_plans_are_limited(serving: Serving) -> None:
    async with serving("immediate", max_stored_bytes_per_token=6000) as service:
        await service.import_plan()
        for microbatches in range(3, 40):
            answer = await service.submit(problem(microbatches))
            if answer.status_code != 202:
                break
            await service.ended(answer.json()["id"])
        said = refusal(answer)
        assert "--max-stored-bytes-per-token" in said
        assert "--keep-plan-days" in said
        # Reading goes on.
        assert (await service.http.get("/v1/plans")).status_code == 200


async def agents(service: Service, digits: str) -> list[int]:
    found = []
    for digit in digits:
        body = {"id": digit * 32, "name": "n", "address": "10.0.0.1", "port": 29500, "slots": 1}
        answer = await service.http.post("/v1/agents", json={**body, "allows": {"models": ["a.*"]}})
        found.append(answer.status_code)
    return found


async def test_agents_beyond_the_limit_are_refused_until_one_leaves(serving: Serving) -> None:
    async with serving("immediate", max_agents_per_token=2) as service:
        assert await agents(service, "abc") == [201, 201, 429]
        assert (await service.http.delete(f"/v1/agents/{'a' * 32}")).status_code == 204
        assert await agents(service, "c") == [201]


async def test_runs_are_limited(serving: Serving) -> None:
    async with serving("immediate", max_stored_rows_per_token=3) as service:
        body = {"plan_id": await service.import_plan(), "model": MODEL, "nodes": 1, "steps": 1}

        async def submit(**headers: str) -> httpx.Response:
            return await service.http.post("/v1/runs", json=body, headers=headers)

        for _ in range(3):
            assert (await submit()).status_code == 202
        assert "--keep-plan-days" in refusal(await submit())


async def test_many_requests_between_two_counts_do_not_exceed_the_limit(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "FRESH_SECONDS", (1e6, 1e6))
    async with serving("immediate", max_stored_rows_per_token=3) as service:
        found = await asyncio.gather(*(service.submit(problem(number)) for number in range(2, 12)))
        assert sorted(answer.status_code for answer in found) == [202] * 3 + [429] * 7


async def test_each_token_is_counted_by_itself(database: Database) -> None:
    searches, plans = SearchTable(database), PlanTable(database)
    for name, caller in (("1", "a"), ("2", "a"), ("3", "b"), ("4", None)):
        await searches.add(a_search(name, created_by=caller))
    await plans.add(a_plan("f" * 64), "b")
    await plans.add(a_plan("e" * 64))
    found = {}
    for caller in ("a", "b", None):
        grant = Grant(caller, frozenset(), "token", token_id="x")
        stored = await Quotas(database, Settings()).stored(grant)
        found[caller] = (stored.rows["searches"], stored.rows["plans"])
        assert stored.size >= 7 * stored.rows["searches"]  # each has a problem of seven bytes
    assert found == {"a": (2, 0), "b": (1, 1), None: (1, 1)}
