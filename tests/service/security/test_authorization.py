"""Authorization: every route requires a scope, as in RFC 6750, and a token stores a limited amount."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from support.serving import PROBLEM, Service, Serving
from support.stored import a_plan, a_search, next_of
from support.tokens import add, bearer, kind_of
from zbv_service.app import create_app
from zbv_service.database import Database, PlanTable, SearchTable
from zbv_service.records.searches import Outcome
from zbv_service.security import quotas
from zbv_service.security.access import needs, require_declared, scopes_of
from zbv_service.security.quotas import Quotas
from zbv_service.security.tokens import SCOPES, Grant, TokenText
from zbv_service.settings import Settings

PUBLIC = {
    *(("GET", path) for path in ("/healthz", "/readyz", "/errors/{name}", "/sign-in")),
    *(("POST", path) for path in ("/sign-in", "/sign-out")),
}


def requests(app: FastAPI) -> list[tuple[str, str, list[str] | None]]:
    """The method, the path and the scopes of every operation."""
    routes = (route for route in app.router.routes if isinstance(route, APIRoute))
    return [(method, route.path, scopes_of(route)) for route in routes for method in route.methods or ()]


def address(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "0", path)


async def test_every_route_requires_a_token_or_is_public(guarded: Service) -> None:
    asked = 0
    for method, path, scopes in requests(guarded.app):
        answer = await guarded.http.request(method, address(path))
        if (method, path) in PUBLIC:
            assert scopes == [], f"{method} {path}"
            assert answer.status_code != 401, f"{method} {path}"
            continue
        asked += 1
        assert (answer.status_code, kind_of(answer)) == (401, "unauthenticated"), f"{method} {path}"
        assert answer.headers["www-authenticate"] == 'Bearer realm="zbv"'
        assert answer.headers["content-type"] == "application/problem+json"
    assert asked > 30


async def test_every_route_accepts_its_scope_and_admin_and_refuses_other_tokens(guarded: Service) -> None:
    for scope in SCOPES:
        fields = await add(guarded, scope, name=scope)
        for method, path, scopes in requests(guarded.app):
            if not scopes:
                continue
            answer = await guarded.http.request(method, address(path), headers=fields)
            if scope in scopes or scope == "admin":
                assert answer.status_code not in (401, 403), f"{scope}: {method} {path}"
                continue
            assert (answer.status_code, kind_of(answer)) == (403, "insufficient-scope"), f"{method} {path}"
            challenge = f'Bearer realm="zbv", error="insufficient_scope", scope="{" ".join(scopes)}"'
            assert answer.headers["www-authenticate"] == challenge


def test_only_get_routes_accept_the_scope_read() -> None:
    for method, path, scopes in requests(create_app(Settings(auth="none"))):
        if scopes and method != "GET" and set(scopes) != set(SCOPES):
            assert "read" not in scopes, f"{method} {path}"
        if scopes and method == "GET" and path != "/v1/agents/{agent_id}/work":
            assert "read" in scopes, f"{method} {path}"


def test_an_application_with_an_undeclared_route_is_not_constructed() -> None:
    router = APIRouter()
    router.add_api_route("/open", lambda: None, dependencies=[needs("read")])
    require_declared(router)
    router.add_api_route("/forgotten", lambda: None)
    with pytest.raises(RuntimeError, match=r"forgotten.* declares no scope"):
        require_declared(router)


BASE = 'Bearer realm="zbv"'


async def test_wrong_credentials_are_challenged(guarded: Service) -> None:
    invalid = ("Bearer", "Bearer x y", "bearer zbv_é", f"Bearer {TokenText.new()}")
    others = ("Basic dXNlcjpwYXNz", "", str(TokenText.new()))  # they may be for a proxy
    for credentials in (*invalid, *others):
        answer = await guarded.http.get("/v1/searches", headers=[(b"Authorization", credentials.encode())])
        challenge = BASE + ', error="invalid_token"' * (credentials in invalid)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, challenge), credentials


async def test_wrong_tokens_never_lock_out_a_valid_one(guarded: Service) -> None:
    right = await add(guarded, "read")
    known: Any = TokenText.parse(right["Authorization"].removeprefix("Bearer "))
    guessed = bearer(str(TokenText(known.id, TokenText.new().secret)))
    for wrong in [bearer(str(TokenText.new()))] * 30 + [guessed] * 30:
        assert (await guarded.http.get("/v1/searches", headers=wrong)).status_code == 401
    fields = {"Authorization": right["Authorization"].replace("Bearer", "bEARER")}
    assert (await guarded.http.get("/v1/searches", headers=fields)).is_success
    again = await guarded.http.get("/v1/searches", headers=guessed)
    assert again.status_code == 401, "also after the right one was cached"


async def test_searches_and_runs_store_the_name_of_their_token(guarded: Service) -> None:
    guarded.http.headers.update(await add(guarded, "search", "launch", name="alice"))
    search = (await guarded.submit()).json()["id"]
    run = (await guarded.submit_run(plan_id=None, problem=PROBLEM)).json()["id"]
    application = guarded.app.state.application
    assert (await application.searches.get(search)).created_by == "alice"
    assert (await application.runs.get(run)).created_by == "alice"


async def test_a_token_has_a_limit_of_unfinished_searches(serving: Serving) -> None:
    async with serving("held", auth="tokens", max_searches_per_token=2) as service:

        async def submit(fields: dict[str, str], *microbatches: int) -> list[httpx.Response]:
            service.http.headers.update(fields)
            return [await service.submit(problem(count)) for count in microbatches]

        alice, bob = await add(service, "search", name="alice"), await add(service, "search", name="bob")
        one = await add(service, "search", name="one", max_searches=1)
        first, *others = await submit(alice, 2, 3, 4, 2)
        # The last one exists, and does not count again.
        assert [answer.status_code for answer in (first, *others)] == [202, 202, 429, 202]
        assert (kind_of(others[1]), int(others[1].headers["retry-after"]) > 0) == ("too-many-searches", True)
        assert [answer.status_code for answer in await submit(bob, 5)] == [202]
        assert [answer.status_code for answer in await submit(one, 6, 7)] == [202, 429]
        await service.http.post(f"/v1/searches/{first.json()['id']}/cancel", headers=alice)
        while (await submit(alice, 4))[0].status_code == 429:
            pass


async def test_a_local_service_can_do_without_tokens(service: Service) -> None:
    assert (await service.http.get("/v1/searches", headers=bearer("nonsense"))).is_success
    for fields in (  # sent by a page of another site in a browser on this machine
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        for path in ("/v1/searches", "/example", "/v1/plans", "/v1/runs", "/v1/agents", "/v1/sign-in-links"):
            refused = await service.http.post(path, json={"problem": PROBLEM}, headers=fields)
            assert (refused.status_code, kind_of(refused)) == (403, "other-origin"), (path, fields)
        assert (await service.http.get("/v1/searches", headers=fields)).is_success, "a link may lead here"
    assert await service.listed("searches") == []
    for fields in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "http://zbv"}):
        sent = await service.http.post("/v1/searches", json={"problem": PROBLEM}, headers=fields)
        assert sent.is_success, fields


def test_openapi_lists_the_scopes_of_each_operation() -> None:
    app = create_app(Settings())
    paths = app.openapi()["paths"]
    for method, path, scopes in requests(app):
        if operation := paths.get(path, {}).get(method.lower()):
            one_each = [[]] if set(scopes or ()) == set(SCOPES) else [[scope] for scope in scopes or ()]
            assert operation.get("security", []) == [{"token": named} for named in one_each], path
            assert {"401", "403"} & operation["responses"].keys() == ({"401", "403"} if scopes else set())


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
        microbatches = 3
        while (answer := await service.submit(problem(microbatches))).status_code == 202:
            await service.ended(answer.json()["id"])
            microbatches += 1
        assert "--max-stored-bytes-per-token" in refusal(answer)
        assert await service.listed("plans") != [], "reading goes on"


async def test_agents_and_runs_beyond_the_limit_are_refused(serving: Serving) -> None:
    node = {"name": "n", "address": "10.0.0.1", "port": 29500, "slots": 1}

    async def register(digit: str) -> int:
        return (await service.http.post("/v1/agents", json={"id": digit * 32, **node})).status_code

    async with serving("immediate", max_agents_per_token=2, max_stored_rows_per_token=3) as service:
        assert [await register(digit) for digit in "abc"] == [201, 201, 429]
        assert (await service.http.delete(f"/v1/agents/{'a' * 32}")).status_code == 204
        assert await register("c") == 201
        plan_id = await service.import_plan()
        statuses = [(await service.submit_run(plan_id=plan_id)).status_code for _ in range(3)]
        assert statuses == [202] * 3
        assert "--keep-plan-days" in refusal(await service.submit_run(plan_id=plan_id))


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
    claim = await next_of(searches)
    assert await searches.finished(claim.id, claim.fence, Outcome.of(a_plan("d" * 64)))
    found = {}
    for caller in ("a", "b", None):
        grant = Grant(caller, frozenset(), "token", token_id="x")
        stored = await Quotas(database, Settings()).stored(grant)
        found[caller] = tuple(stored.rows[kind] for kind in ("searches", "plans", "plans of searches"))
        assert stored.size >= 7 * stored.rows["searches"]  # each has a problem of seven bytes
    assert found == {"a": (2, 0, 1), "b": (1, 1, 0), None: (1, 2, 0)}
