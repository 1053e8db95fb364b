"""Errors: their types are a contract, their promises are true, and browsers get pages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from support.serving import MODEL, PROBLEM, Service, Serving
from zbv_service.api.error_advice import ADVICE
from zbv_service.api.negotiation import HTML, accepts
from zbv_service.database import Database, DatabaseAway
from zbv_service.database.engine import Base
from zbv_service.errors import error_document, kinds


async def test_every_type_has_a_meaning_a_remedy_and_a_page_at_its_address(service: Service) -> None:
    assert set(ADVICE) == set(kinds())
    for name, kind in kinds().items():
        assert ADVICE[name].meaning.endswith(".")
        assert ADVICE[name].remedy.endswith(".")
        page = await service.http.get(error_document(kind, "")["type"])
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert name in page.text
        assert str(kind.status) in page.text
    assert (await service.http.get("/errors/none")).status_code == 404


async def test_a_wrong_method_and_options_list_the_allowed_methods(service: Service) -> None:
    for method, path, allowed in (
        ("DELETE", "/v1/searches", {"GET", "HEAD", "POST", "OPTIONS"}),
        ("PATCH", "/v1/searches/x", {"GET", "HEAD", "DELETE", "OPTIONS"}),
        ("GET", "/v1/searches/x/cancel", {"POST", "OPTIONS"}),
        ("POST", "/healthz", {"GET", "HEAD", "OPTIONS"}),
        ("POST", "/static/zbv.css", {"GET", "HEAD", "OPTIONS"}),
    ):
        answer = await service.http.request(method, path)
        assert (answer.status_code, answer.json()["type"]) == (405, "/errors/method-not-allowed"), path
        assert set(answer.headers["allow"].split(", ")) == allowed, path
        options = await service.http.options(path)
        assert (options.status_code, options.content) == (204, b""), path
        assert set(options.headers["allow"].split(", ")) == allowed, path


async def test_head_returns_the_headers_of_get_without_a_body(service: Service) -> None:
    ended = await service.done()
    search, plan = f"/v1/searches/{ended['id']}", f"/v1/plans/{ended['plan_id']}"
    own = {"x-request-id", "etag", "last-modified", "content-length"}
    for path in (
        *("/", "/healthz", search, plan, f"{plan}/ranks/0", f"{search}/events", "/v1/searches/none"),
        *("/nothing", "/static/zbv.css"),
    ):
        get, head = await service.http.get(path), await service.http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert {*head.headers} - own == {*get.headers} - own, path
        if get.status_code != 404:
            assert head.headers.get("content-length") == get.headers.get("content-length"), path


async def test_head_of_an_endless_stream_ends(held: Service) -> None:
    address = f"/v1/searches/{(await held.submit()).json()['id']}/events"
    answer = await held.http.head(address, headers={"Accept": "text/event-stream"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_readiness_names_every_failed_check(serving: Serving) -> None:
    async with serving("immediate") as service:
        ready = await service.http.get("/readyz")
        assert (ready.status_code, ready.headers["cache-control"]) == (200, "no-store")
        await service.app.state.application.runner.stop()
        answer = await service.http.get("/readyz")
        assert (await service.http.get("/healthz")).status_code == 200
    assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
    assert [entry["check"] for entry in answer.json()["errors"]] == ["searches"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_crash_shows_its_request_id_and_only_the_log_has_details(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(*_: object) -> None:
        raise RuntimeError("secret detail")

    async with serving("immediate") as service:
        monkeypatch.setattr(service.app.state.application.searches, "get", failing)
        answer = await service.http.get("/v1/searches/x")
    body = answer.json()
    assert (answer.status_code, body["type"]) == (500, "/errors/internal-error")
    assert body["request_id"] == answer.headers["x-request-id"]
    assert "secret" not in json.dumps(body)
    assert "secret" in caplog.text


KEY = {"Idempotency-Key": "one"}


async def rows(database: Database) -> dict[str, int]:
    """The number of rows of every table, except the one that running services update by themselves."""
    async with database.writing() as session:
        tables = [table for table in Base.metadata.sorted_tables if table.name != "listeners"]
        return {t.name: await session.scalar(select(func.count()).select_from(t)) or 0 for t in tables}


async def submit_run(service: Service, plan_id: str) -> Any:
    body = {"plan_id": plan_id, "model": MODEL, "nodes": 2, "steps": 5}
    return await service.http.post("/v1/runs", json=body, headers=KEY)


def lose_the_answers_to_commits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Cut the connection after a commit, this number of times."""
    real, left = Database.writing, count

    @asynccontextmanager
    async def writing(self: Database) -> AsyncIterator[AsyncSession]:
        nonlocal left
        async with real(self) as session:
            yield session
        left -= 1
        if left >= 0:
            raise DatabaseAway("cut off after COMMIT")

    monkeypatch.setattr(Database, "writing", writing)


async def test_a_lost_answer_to_a_commit_is_not_reported_as_a_failure(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving("immediate", preload="at-first-search") as service:
        await service.app.state.application.runner.stop()
        await service.app.state.application.dispatcher.stop()
        plan_id = await service.import_plan()
        for send, listed in (
            (lambda: submit_run(service, plan_id), "runs"),
            (lambda: service.http.post("/v1/searches", json={"problem": PROBLEM}), "searches"),
        ):
            with monkeypatch.context() as patch:
                lose_the_answers_to_commits(patch, 1)
                answer = await send()
            assert (answer.status_code, answer.json()["type"]) == (503, "/errors/not-ready")
            assert "may still have been carried out" in answer.json()["detail"]
            (stored,) = (await service.get(f"/v1/{listed}"))[listed]
            again = await send()
            assert (again.status_code, again.json()["id"]) == (202, stored["id"])


async def test_a_crash_after_a_commit_says_that_the_request_may_have_succeeded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_id = await service.import_plan()

    def failing() -> None:
        raise RuntimeError("after the run was stored")

    with monkeypatch.context() as patch:
        patch.setattr(service.app.state.application.dispatcher, "wake", failing)
        answer = await submit_run(service, plan_id)
    assert (answer.status_code, answer.json()["type"]) == (500, "/errors/internal-error")
    assert "may still have been carried out" in answer.json()["detail"]
    (stored,) = await service.listed("runs")
    assert (await submit_run(service, plan_id)).json()["id"] == stored["id"]


WRONG_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/searches", {"problem": {**PROBLEM, "pp_degree": 0}}),
    ("/v1/searches", {"problem": PROBLEM, "options": {"effort": "none"}}),
    ("/v1/runs", {"problem": PROBLEM, "model": MODEL, "nodes": 3, "steps": 5}),
    (
        "/v1/runs",
        {"problem": PROBLEM, "model": MODEL, "nodes": 2, "steps": 5, "search_options": {"seed": -1}},
    ),
    ("/v1/runs", {"plan_id": "0" * 64, "model": MODEL, "nodes": 2, "steps": 5}),
    ("/v1/plans", {"problem": PROBLEM, "ranks": []}),
    ("/v1/agents", {"id": "a" * 32, "name": "h", "address": "h", "port": 0, "slots": 1}),
]


async def test_a_wrong_body_and_a_request_from_another_site_store_nothing(service: Service) -> None:
    database = service.app.state.application.database
    before = await rows(database)
    for path, body in WRONG_BODIES:
        answer = await service.http.post(path, json=body, headers=KEY)
        assert (answer.status_code, answer.json()["type"]) == (422, "/errors/invalid-body"), answer.text
        assert await rows(database) == before, body
    other = {"Origin": "http://evil"}
    for path in ("/v1/searches", "/example", "/v1/plans", "/v1/runs", "/v1/agents", "/v1/sign-in-links"):
        answer = await service.http.post(path, json={"problem": PROBLEM}, headers=other)
        assert (answer.status_code, answer.json()["type"]) == (403, "/errors/other-origin"), path
    assert await rows(database) == before


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_named"),
    [
        ([], False),
        (["*/*"], False),
        (["application/json"], False),
        ([BROWSER], True),
        (["TEXT/HTML;level=1;q=0.9, application/json"], True),
        (["application/json", "text/html"], True),
        ([";;;,,/,text/,/html"], False),
    ],
)
def test_a_caller_accepts_what_it_names(accept: list[str], is_named: bool) -> None:
    headers = [(b"accept", value.encode()) for value in accept]
    assert accepts(Request({"type": "http", "headers": headers}), HTML) is is_named


async def test_resources_are_json_for_browsers_too_and_have_pages(service: Service) -> None:
    accepted = await service.submit()
    ended = await service.ended(accepted.json()["id"])
    for address in (accepted.headers["location"], f"/v1/plans/{ended['plan_id']}", "/v1/searches"):
        answer = await service.http.get(address, headers={"accept": BROWSER})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        shown = await service.http.get(address.removeprefix("/v1"))
        assert (shown.status_code, shown.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert ended["plan_id"][:12] in shown.text
