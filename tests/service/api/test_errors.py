"""The types of errors are a contract: names, statuses and titles, each with a page at its address."""

from __future__ import annotations

import json

import pytest
from support.serving import Service, Serving
from zbv_service.api.error_advice import ADVICE
from zbv_service.errors import error_document, kinds


def test_every_type_has_a_meaning_and_a_remedy() -> None:
    assert set(ADVICE) == set(kinds())
    for advice in ADVICE.values():
        assert advice.meaning.endswith(".")
        assert advice.remedy.endswith(".")


async def test_every_type_is_the_address_of_its_page(service: Service) -> None:
    for name, kind in kinds().items():
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
    search_id = (await service.submit()).json()["id"]
    plan_id = (await service.ended(search_id))["plan_id"]
    paths = (
        "/",
        "/healthz",
        f"/v1/searches/{search_id}",
        f"/v1/plans/{plan_id}",
        f"/v1/plans/{plan_id}/ranks/0",
        f"/v1/searches/{search_id}/events",
        "/v1/searches/none",
        "/nothing",
        "/static/zbv.css",
    )
    for path in paths:
        get, head = await service.http.get(path), await service.http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        own = {"x-request-id", "etag", "last-modified", "content-length"}
        assert {*head.headers} - own == {*get.headers} - own, path
        if "404" not in str(get.status_code):
            assert head.headers.get("content-length") == get.headers.get("content-length"), path


async def test_head_of_an_endless_stream_ends(held: Service) -> None:
    search_id = (await held.submit()).json()["id"]
    answer = await held.http.head(f"/v1/searches/{search_id}/events", headers={"Accept": "text/event-stream"})
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
