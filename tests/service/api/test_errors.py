"""Errors are problem documents (RFC 9457) with types that are a contract; a wrong request stores nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from support.layered import LAYERED
from support.serving import MODEL, PROBLEM, Service, Serving
from support.worst_bodies import AGENT
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


async def test_readiness_names_every_failed_check(service: Service) -> None:
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
    assert body["detail"].endswith("Repeat the request in a moment."), "reading changes nothing"
    assert "secret" not in json.dumps(body)
    assert "secret" in caplog.text


KEY = {"Idempotency-Key": "one"}


async def submit_run(service: Service, plan_id: str) -> Any:
    body = {"plan_id": plan_id, "model": MODEL, "nodes": 2, "steps": 5}
    return await service.http.post("/v1/runs", json=body, headers=KEY)


def lose_the_answers_to_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the connection after each commit."""
    real = Database.writing

    @asynccontextmanager
    async def writing(self: Database) -> AsyncIterator[AsyncSession]:
        async with real(self) as session:
            yield session
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
                lose_the_answers_to_commits(patch)
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


JSON = {"content-type": "application/json"}


NO_BODY = [
    ("GET", "/v2/nothing", 404, "not-found"),
    ("GET", "/v1/searches/nothing", 404, "not-found"),
    ("GET", "/v1/runs/%00", 404, "not-found"),
    ("POST", "/v1/agents/%00/drain", 404, "not-found"),
]
"""Methods, addresses, and the expected errors."""
NESTED = b'{"model": {"model_type": "llama", "x": ' + b"[" * 260 + b"]" * 260 + b"}}"
"""Beyond what pydantic writes."""
UNREADABLE = [
    ("searches", b"", 400, "malformed-json"),
    ("searches", b'{"problem": ', 400, "malformed-json"),
    ("searches", b'{"problem": NaN}', 400, "malformed-json"),
    ("searches", b'{"problem": "\xff"}', 400, "malformed-json"),
    ("searches", b"[" * 40_000, 400, "malformed-json"),
    ("searches", b'{"problem": ' + b"9" * 5000 + b"}", 400, "malformed-json"),
    ("layouts", NESTED, 400, "malformed-json"),
    ("searches", b'{"problem": {"microbatches": 8, "microbatches": 9}}', 422, "invalid-body"),
    ("searches", b" " * 100_001, 413, "body-too-large"),
    ("plans", b" " * 200_001, 413, "body-too-large"),
]
"""What they are posted to, bodies, and the expected errors."""


def problem(**changes: Any) -> dict[str, Any]:
    return {"problem": {**PROBLEM, **changes}}


def options(**options: Any) -> dict[str, Any]:
    return {"problem": PROBLEM, "options": options}


def layers(**changes: Any) -> dict[str, Any]:
    return {"problem": {**LAYERED, **changes}}


MANY = {"rank": [{"samples": [1] * 10_000}] * 2, "transfer": {"samples": [1]}}
BY_LETTER = {"action": {key: {"samples": [1] * 6_667} for key in "FIW"}}
EMBEDDING, BLOCK, HEAD = LAYERED["layers"]
PRESETS = {"presets": ["llama-3.1-8b"] * 9}
ONE_NODE = {"nodes": 1, "gpus_per_node": 8, "device": "h100"}
MANY_TOKENS = {"sequences": [1], "problem": {}, "max_tokens": 10**4000}
INVALID: list[tuple[str, Any, str]] = [
    ("searches", [], ""),
    ("searches", {}, "/problem"),
    ("searches", {"x": 1}, "/x"),
    ("searches", {"problem": "\ud800", "\udfff": 1}, "/problem"),
    ("searches", problem(units={"time": "a\0b"}), "/problem/units/time"),
    ("searches", problem(microbatches=10**30), "/problem/microbatches"),
    ("searches", problem(pp_degree=1000, microbatches=10**5), "/problem/microbatches"),  # for the planner
    ("searches", problem(pp_degree=8, microbatches=5000), "/problem/microbatches"),  # for this service
    ("searches", options(quantile=0.9), "/options/quantile"),
    ("searches", options(jitter={"action": 0.05}, quantile=0.3), "/options/quantile"),
    ("searches", options(jitter={"rank": [0.1, 0.1, 0.1]}), "/options/jitter/rank"),
    ("searches", options(jitter="5%"), "/options/jitter"),
    ("searches", options(jitter=MANY), "/options/jitter"),
    ("searches", options(jitter=BY_LETTER), "/options/jitter"),
    ("searches", layers(layers=[EMBEDDING, {**BLOCK, "colour": "red"}, HEAD]), "/problem/layers/1/colour"),
    ("searches", layers(cut={"together": [["head"]] * 600}), "/problem/cut/together"),
    ("searches", layers(microbatches=10_000), "/problem/microbatches"),
    # The finest placement has eight stages: fewer microbatches than the four of V allow.
    ("searches", layers(placement="auto", microbatches=4000), "/problem/microbatches"),
    ("layouts", {"model": {"x": {"\0": 1}}}, "/model/x"),  # in a key that would be ignored
    ("layouts", {"model": PRESETS, "cluster": ONE_NODE, "global_batch": 8}, "/model/presets"),
    ("problems/pack", {"batch": MANY_TOKENS}, "/batch/max_tokens"),
    ("plans", {"problem": {}}, "/ranks"),
    ("agents", {**AGENT, "port": 0}, "/port"),
]
"""What they are posted to, documents, and the place of the mistake."""


async def rows(database: Database) -> dict[str, int]:
    """The number of rows of every table, except the one that running services update by themselves."""
    tables = [table for table in Base.metadata.sorted_tables if table.name != "listeners"]
    return {t.name: (await database.rows(select(func.count()).select_from(t)))[0][0] for t in tables}


async def test_every_error_is_a_problem_document_and_stores_nothing(service: Service) -> None:
    before = await rows(service.app.state.application.database)

    async def refused(method: str, path: str, status: int, kind: str, **how: Any) -> list[Any]:
        """Send a request; the places of its mistakes."""
        answer = await service.http.request(method, path, **how)
        assert answer.headers["content-type"] == "application/problem+json", path
        body = answer.json()
        assert (answer.status_code, body["status"], body["type"]) == (status, status, f"/errors/{kind}"), body
        assert set(body) <= {"type", "title", "status", "detail", "errors", "request_id"}, path
        assert body["title"]
        assert len(body["detail"]) > 10, body
        errors = body.get("errors", [])
        assert all(set(entry) in ({"pointer", "detail"}, {"parameter", "detail"}) for entry in errors)
        return [entry.get("pointer") for entry in errors]

    for method, path, status, kind in NO_BODY:
        await refused(method, path, status, kind)
    await refused("POST", "/v1/searches", 415, "unsupported-media-type", content=b"{}")
    for what, content, status, kind in UNREADABLE:
        await refused("POST", f"/v1/{what}", status, kind, content=content, headers=JSON)
    for what, document, pointer in INVALID:
        content = json.dumps(document).encode()
        pointers = await refused("POST", f"/v1/{what}", 422, "invalid-body", content=content, headers=JSON)
        assert pointer in pointers, (what, pointers)
    assert await rows(service.app.state.application.database) == before


async def test_types_are_addresses_below_the_root_path(serving: Serving) -> None:
    async with serving("broken") as service:
        failed = await service.done()
        run = {"problem": PROBLEM, "model": MODEL, "nodes": 2, "steps": 5}
        run_id = (await service.http.post("/v1/runs", json=run)).json()["id"]
        await service.until_run(run_id, lambda found: found["state"] == "failed")
        transport = httpx.ASGITransport(service.app, root_path="/planner")
        async with httpx.AsyncClient(transport=transport, base_url="http://zbv") as http:
            search = f"/planner/v1/searches/{failed['id']}"
            missing = (await http.get("/planner/v1/searches/x")).json()
            listed = (await http.get("/planner/v1/searches")).json()["searches"]
            events = (await http.get(f"{search}/events?after=0")).json()["events"]
            runs = (await http.get("/planner/v1/runs")).json()["runs"]
            errors = [(await http.get(search)).json()["error"], listed[-1]["error"], events[-1]["error"]]
            for error in (missing, *errors, runs[0]["error"]):
                assert error["type"].startswith("/planner/errors/"), error
                assert (await http.get(error["type"])).status_code == 200
            page = await http.get("/planner/v1/searches/x/problem", headers={"accept": "text/html"})
            assert 'href="/planner/errors/not-found"' in page.text
    assert failed["error"]["type"].startswith("/errors/"), "without a root path"


async def test_a_body_without_a_declared_length_is_limited(serving: Serving) -> None:
    async def endless() -> Any:
        for _ in range(10_000):
            yield b" " * 1000

    async with serving("immediate") as service:
        answer = await service.http.post("/v1/searches", content=endless(), headers=JSON)
        assert (answer.status_code, answer.json()["type"]) == (413, "/errors/body-too-large")
