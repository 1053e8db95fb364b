"""Pages as HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from http.client import responses
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from zbv_service.api.negotiation import VARY, root_of
from zbv_service.api.state import state_of
from zbv_service.pages.shell import CONTENT_SECURITY_POLICY, Shell, render
from zbv_service.security.grants import Grant

_PASSING = frozenset({429, 500, 503})
"""Statuses of errors that may be temporary."""
_WRONG_PARAMETERS = 422

NO_STORE: Mapping[str, str] = MappingProxyType({"Cache-Control": "no-store"})


def html(content: bytes, status: int = 200, headers: Mapping[str, str] = NO_STORE) -> HTMLResponse:
    """A page with a policy that lets browsers load only the service's own files."""
    return HTMLResponse(content, status, {"Content-Security-Policy": CONTENT_SECURITY_POLICY, **headers})


async def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A template rendered for the reader who sent a request: in a thread, because a page may be large."""
    write = partial(render, template, shell_of(request), **values)
    return html(await state_of(request).computations.write(write), status)


def error_answer(document: Mapping[str, Any], request: Request, headers: Mapping[str, str]) -> HTMLResponse:
    """An error document (RFC 9457) as a page."""
    shell = shell_of(request)
    again = f"{shell.path}?{request.url.query}" if request.url.query else shell.path
    values = _error_values(document, again if request.method == "GET" else None)
    content = render("error.html.j2", shell, **values)
    return html(content, int(document["status"]), {**VARY, **NO_STORE, **headers})


def _error_values(document: Mapping[str, Any], again: str | None) -> dict[str, Any]:
    """The template's values for an error document (RFC 9457).

    Parameters
    ----------
    again
        The address for another attempt, without the prefix of a proxy; None if the request was not a GET.
    """
    status, title = int(document["status"]), str(document["title"])
    phrase = responses.get(status, "")
    kind = str(document.get("type", "about:blank"))
    detail, errors = str(document["detail"]), document.get("errors") or ()
    is_repeated = bool(errors) and all(error["detail"] in detail for error in errors)
    return {
        "error": document,
        "phrase": "" if phrase == title else phrase,
        "detail": "" if is_repeated else detail[:1].upper() + detail[1:],
        "errors": errors,
        "about": kind if kind.startswith("/") else None,
        "again": again if status in _PASSING else None,
        "bare": again is not None and "?" in again and status == _WRONG_PARAMETERS,
    }


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
