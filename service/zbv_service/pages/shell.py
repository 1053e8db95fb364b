"""The surroundings of all pages, and pages as answers of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment
from zbv_solver import __version__
from zbv_solver.export import quantities, report

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.pages import words
from zbv_service.pages.assets import assets
from zbv_service.security.tokens import Grant, allows

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing inline, no eval, nothing from other origins."""

_JOINED = 1000
"""Pieces of a page that are joined at a time."""


@dataclass(frozen=True)
class Shell:
    """The surroundings of a page."""

    root: str = ""
    """The prefix under which a proxy serves the application (ASGI's ``root_path``); no trailing slash."""
    base_url: str = "http://127.0.0.1:8000"
    """The address that the reader's browser uses, for examples of commands; no trailing slash."""
    account: str | None = None
    """The name of the signed-in reader; None if the service needs no sign-in."""
    may: frozenset[str] = frozenset()
    """The scopes of the reader, which decide what a page offers; empty if there was no sign-in."""
    path: str = "/"
    """The path of the page, without ``root``."""

    @property
    def may_search(self) -> bool:
        """Whether to offer actions that need the scope ``search``."""
        return self.allows("search")

    @property
    def may_launch(self) -> bool:
        """Whether to offer actions that need the scope ``launch``."""
        return self.allows("launch")

    def allows(self, scope: str) -> bool:
        """Whether the reader has a scope; without a sign-in, everybody has all."""
        return not self.may or allows(self.may, [scope])


def render(template: str, shell: Shell, **values: Any) -> bytes:
    """Render a template of ``templates/``, with ``shell``, ``root`` and ``static`` added, as UTF-8.

    Jinja joins all pieces of a page in one call, which keeps the interpreter from other threads; this joins
    a few at a time.
    """
    surroundings = {
        "shell": shell,
        "root": shell.root,
        "static": f"{shell.root}/static/{assets()}",
        "assets": assets(),
        "version": __version__,
    }
    pieces = _environment().get_template(template).generate(**surroundings, **values)
    content = bytearray()
    while some := list(islice(pieces, _JOINED)):
        content += "".join(some).encode()
    return bytes(content)


NO_STORE: Mapping[str, str] = MappingProxyType({"Cache-Control": "no-store"})


def html(content: bytes, status: int = 200, headers: Mapping[str, str] = NO_STORE) -> HTMLResponse:
    """A page with a policy that lets browsers load only the service's own files."""
    return HTMLResponse(content, status, {"Content-Security-Policy": CONTENT_SECURITY_POLICY, **headers})


async def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A template rendered for the reader who sent a request: in a thread, because a page may be large."""
    write = partial(render, template, shell_of(request), **values)
    return html(await state_of(request).computations.write(write), status)


def shell_of(request: Request) -> Shell:
    """The surroundings of a page; public pages have no account."""
    grant: Grant | None = getattr(request.state, "grant", None)
    return Shell(
        root=root_of(request),
        base_url=str(request.base_url).rstrip("/"),
        account=grant.name if grant is not None and grant.means == "session" else None,
        may=frozenset() if grant is None else grant.scopes,
        path=request.url.path.removeprefix(root_of(request)),
    )


@cache
def _environment() -> Environment:
    environment = report.environment(Path(__file__).parent / "templates")
    environment.filters.update(
        moment=words.moment,
        ago=quantities.ago,
        clock=words.clock,
        marked=words.marked,
        grouped=words.grouped,
        reached_step=words.reached_step,
        recomputed=words.recomputed,
        tone=words.tone,
        signed=words.signed,
        seconds=words.seconds,
        gigabytes=quantities.gigabytes,
        time_unit=quantities.time_unit,
    )
    environment.globals["bytes"] = words.BYTES
    return environment
