"""Security headers of every response, and the host names that a service accepts."""

from __future__ import annotations

from typing import Any

import pytest
from support.serving import Service, Serving
from zbv_service.pages import shell
from zbv_service.settings import Settings

ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


async def test_every_response_has_security_headers(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("immediate", auth="tokens") as service:

        async def crash(*_: Any) -> None:
            raise RuntimeError

        monkeypatch.setattr(service.app.state.application.readiness, "failed_checks", crash)
        for status, path in (
            (200, "/healthz"),
            (401, "/v1/searches"),
            (404, "/nothing"),
            (200, "/static/zbv.css"),
            (200, "/sign-in"),
            (404, "/%00"),
            (500, "/readyz"),
        ):
            answer = await service.http.get(path)
            assert answer.status_code == status
            assert {name: answer.headers.get(name) for name in ALWAYS} == ALWAYS, path
            assert answer.headers.get_list("content-security-policy") != [], path
            assert len(answer.headers.get_list("content-security-policy")) == 1, path
            assert "strict-transport-security" not in answer.headers
        secure = await service.http.get("https://zbv/healthz")
        assert secure.headers["strict-transport-security"] == "max-age=31536000"


async def test_every_response_has_one_cache_control(service: Service) -> None:
    for path, kept in (
        ("/", "no-store"),
        ("/v1/agents", "no-store"),
        ("/v1/searches/x", "no-store"),
        ("/nothing", "no-store"),
        ("/healthz", "no-store"),
        ("/static/zbv.css", "no-cache"),
        ("/errors/not-found", "public, max-age=3600"),
    ):
        answer = await service.http.get(path)
        assert answer.headers.get_list("cache-control") == [kept], path
        again = await service.http.get(path, headers={"If-None-Match": answer.headers.get("etag", "x")})
        assert again.headers.get_list("cache-control") == [kept], path


async def test_every_page_has_the_strict_policy_and_documents_load_nothing(service: Service) -> None:
    plan = f"/plans/{await service.import_plan()}"
    for path in ("/", plan, f"{plan}/compare", f"{plan}/frontier"):
        answer = await service.http.get(path, headers={"Accept": "text/html"})
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"] == shell.CONTENT_SECURITY_POLICY, path
    document = await service.http.get("/v1/searches")
    assert document.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_the_policy_allows_only_files_of_the_service() -> None:
    rules = dict(rule.split(" ", 1) for rule in shell.CONTENT_SECURITY_POLICY.split("; "))
    assert rules.pop("img-src") == "'self' data:"
    own = ("script-src", "style-src", "connect-src", "form-action")
    assert {rules.pop(kind) for kind in own} == {"'self'"}
    assert set(rules.values()) == {"'none'"}


async def test_a_local_service_accepts_only_its_own_names(service: Service) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "zbv.evil:80"):
        refused = await service.http.get("/healthz", headers={"Host": host})
        assert refused.status_code == 400, host
        assert refused.headers["x-content-type-options"] == "nosniff"
    for host in ("127.0.0.1:8000", "LOCALHOST", "[::1]:8000", "zbv"):
        assert (await service.http.get("/healthz", headers={"Host": host})).is_success, host


def test_a_public_service_accepts_any_name_unless_names_are_set() -> None:
    assert Settings(host="0.0.0.0").host_names == ["*"]
    assert Settings(allowed_hosts=("*",)).host_names == ["*"]
    named = Settings(host="0.0.0.0", allowed_hosts=("Planner.example",)).host_names
    assert "Planner.example" in named
    assert "*" not in named
