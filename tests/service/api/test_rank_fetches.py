"""The fast path for rank plans: the same responses to the same callers as the ordinary route."""

from __future__ import annotations

from typing import Any

import pytest
from support.malformed import PLAN
from support.serving import Service, Serving
from support.tokens import add

SCOPES = ("search", "read", "agent", "launch")
OWN = {"x-request-id", "date"}


async def stored(service: Service, headers: dict[str, str] | None = None) -> str:
    answer = await service.http.post("/v1/plans", json=PLAN, headers=headers)
    plan_id: str = answer.json()["plan_id"]
    return plan_id


def fast_fetches(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that are served from memory; the list grows with the requests."""
    plans, found = service.app.state.application.plans, []
    known_rank = plans.known_rank

    def watched(plan_id: str, rank: int) -> Any:
        answer = known_rank(plan_id, rank)
        if answer is not None:
            found.append(rank)
        return answer

    monkeypatch.setattr(plans, "known_rank", watched)
    return found


async def test_the_fast_path_returns_the_same_response(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/v1/plans/{await stored(service)}/ranks/1"
    short = fast_fetches(service, monkeypatch)
    first, second = [await service.http.get(path) for _ in range(2)]
    assert short == [1]  # only the second one
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.content == second.content
    assert "public" not in first.headers["cache-control"]
    headers = [{*answer.headers.multi_items()} for answer in (first, second)]
    assert {item for item in headers[0] ^ headers[1] if item[0] not in OWN} == set()


async def test_other_requests_take_the_ordinary_path(service: Service) -> None:
    plan_id = await stored(service)
    path = f"/v1/plans/{plan_id}/ranks/1"
    known = await service.http.get(path)
    etag = known.headers["etag"]
    assert (await service.http.get(path, headers={"If-None-Match": etag})).status_code == 304
    assert (await service.http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200
    head = await service.http.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)
    assert (await service.http.post(path)).status_code == 405
    for wrong in ("2", "-1", "01", "x", "1/"):
        answer = await service.http.get(f"/v1/plans/{plan_id}/ranks/{wrong}")
        assert answer.status_code == (422 if wrong == "x" else 200 if wrong == "01" else 404), wrong


async def test_the_fast_path_requires_a_token(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("immediate", auth="tokens") as service:
        tokens = {scope: await add(service, scope, name=scope) for scope in SCOPES}
        path = f"/v1/plans/{await stored(service, tokens['search'])}/ranks/0"
        assert (await service.http.get(path, headers=tokens["read"])).status_code == 200
        short = fast_fetches(service, monkeypatch)
        for scope in ("read", "agent"):
            assert (await service.http.get(path, headers=tokens[scope])).status_code == 200
        refused = await service.http.get(path, headers=tokens["launch"])
        assert (refused.status_code, refused.json()["type"]) == (403, "/errors/insufficient-scope")
        unknown = await service.http.get(path)
        assert (unknown.status_code, unknown.json()["type"]) == (401, "/errors/unauthenticated")
        assert unknown.headers["www-authenticate"].startswith("Bearer")
        assert unknown.json()["request_id"] == unknown.headers["x-request-id"]
        assert short == [0] * 4
