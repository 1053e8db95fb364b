"""Security headers, host names that a service accepts, and services behind docker/haproxy.cfg."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support import fake_searches
from support.fake_kinds import kinds
from support.paths import ROOT
from support.serving import Service, Serving
from support.tokens import add_token
from zbv_service.app import create_app
from zbv_service.commands import serving
from zbv_service.commands.serving import CannotServe, config_of
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


CONFIGURATION = ROOT / "docker/haproxy.cfg"
CLIENT = "203.0.113.9"


def passed_on(headers: httpx.Headers, *, over_tls: bool) -> httpx.Headers:
    """The headers that the load balancer forwards, by the few directives that the file uses."""
    found = httpx.Headers(headers)
    frontend = CONFIGURATION.read_text().partition("frontend http\n")[2].partition("\nbackend ")[0]
    lines = map(str.strip, frontend.splitlines())
    for line in (line for line in lines if line and not line.startswith("#")):
        if match := re.fullmatch(r"http-request del-header (\S+)( -m beg)?", line):
            name = match[1].lower()
            for known in list(found):
                if known == name or (match[2] and known.startswith(name)):
                    del found[known]
        elif match := re.fullmatch(r"http-request set-header (\S+) (\S+) if (!?)\{ ssl_fc \}", line):
            if over_tls != bool(match[3]):
                found[match[1]] = match[2]
        elif line == "option forwardfor":
            found["X-Forwarded-For"] = CLIENT
        else:
            assert re.match(r"(bind|default_backend) ", line), f"this test does not know {line!r}"
    return found


@pytest.mark.parametrize("over_tls", [True, False])
async def test_the_load_balancer_forwards_the_scheme(settings: Settings, over_tls: bool) -> None:
    settings = settings.model_copy(update={"auth": "tokens", "trusted_proxies": "*"})
    app = create_app(settings, kinds=kinds(fake_searches.immediate))
    transport = httpx.ASGITransport(config_of(app, settings).loaded_app, client=("10.0.0.2", 1))
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as http:
        token = await add_token(app.state.application.database, "admin")
        claims = {"X-Forwarded-Proto": "http" if over_tls else "https", "X-Forwarded-For": "10.0.0.3"}
        origin = {"Origin": f"http{'s' if over_tls else ''}://zbv", "Forwarded": "proto=https"}
        fields = passed_on(httpx.Headers({"Host": "zbv", **claims, **origin}), over_tls=over_tls)
        answer = await http.post("http://zbv/sign-in", data={"token": token}, headers=fields)
        assert answer.status_code == 303, answer.text
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-") == ("Secure" in cookie) == over_tls
        assert ("strict-transport-security" in answer.headers) == over_tls


@pytest.mark.parametrize(
    ("host", "more", "is_refused"),
    [
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("planner.example", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"trusted_proxies": "10.0.0.2"}, False),
        ("0.0.0.0", {"plain_http": "anywhere"}, False),
        ("0.0.0.0", {"tls_cert": Path("c"), "tls_key": Path("k")}, False),
    ],
)
def test_a_public_address_needs_tls_or_a_trusted_proxy_or_permission(
    host: str, more: dict[str, Any], is_refused: bool, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    resolve(monkeypatch, "planner.example", "0.0.0.0")
    monkeypatch.setattr(serving, "config_of", lambda *_: None)
    monkeypatch.setattr(serving, "_Server", lambda *_: SimpleNamespace(run=lambda **_: None, started=True))
    settings = settings.model_copy(update={"host": host, "port": 0, "auth": "tokens", **more})
    prepared: list[bool] = []
    if not is_refused:
        assert serving.serve(settings, lambda: prepared.append(True))
        assert prepared
        return
    with pytest.raises(CannotServe, match="without TLS") as caught:
        serving.serve(settings, lambda: prepared.append(True))
    assert not prepared
    for remedy in ("--tls-cert", "--trusted-proxies", "--plain-http anywhere"):
        assert remedy in str(caught.value)


def test_a_local_name_that_resolves_to_a_public_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """The local token has every scope, and host names are checked as for a local service."""
    resolve(monkeypatch, "localhost", "0.0.0.0")
    local = settings.model_copy(update={"host": "localhost", "port": 0, "auth": "tokens"})
    with pytest.raises(CannotServe, match=r"localhost, which resolves to 0\.0\.0\.0"):
        serving.serve(local, lambda: None)


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    """Make a name resolve to an address."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: real(address if host == name else host, *more, **named),
    )
