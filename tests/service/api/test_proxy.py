"""A service behind docker/haproxy.cfg, and services on public addresses."""

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
from support.tokens import add_token
from zbv_service.app import create_app
from zbv_service.commands import serving
from zbv_service.commands.serving import CannotServe, config_of
from zbv_service.settings import Settings

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
    if not is_refused:
        assert serving.serve(settings)
        return
    with pytest.raises(CannotServe, match="without TLS") as caught:
        serving.serve(settings)
    for remedy in ("--tls-cert", "--trusted-proxies", "--plain-http anywhere"):
        assert remedy in str(caught.value)


def test_a_local_name_that_resolves_to_a_public_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """The local token has every scope, and host names are checked as for a local service."""
    resolve(monkeypatch, "localhost", "0.0.0.0")
    with pytest.raises(CannotServe, match=r"localhost, which resolves to 0\.0\.0\.0"):
        serving.serve(settings.model_copy(update={"host": "localhost", "port": 0, "auth": "tokens"}))


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, address: str) -> None:
    """Make a name resolve to an address."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: real(address if host == name else host, *more, **named),
    )
