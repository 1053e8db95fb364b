"""Pages as HTTP answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from zbv_service.api.negotiation import VARY, root_of
from zbv_service.errors import ProblemError, problem_document
from zbv_service.observability.context import REQUEST_ID
from zbv_service.pages.shell import CONTENT_SECURITY_POLICY, Shell
from zbv_service.pages.views.problem import problem_page
from zbv_service.security.grants import Grant


def page(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """The text of a page as an answer whose policy lets a browser load only the service's own files."""
    return HTMLResponse(text, status, {"Content-Security-Policy": CONTENT_SECURITY_POLICY, **(headers or {})})


def problem_answer(
    error: ProblemError, request: Request, headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    """An error as a page."""
    request_id = REQUEST_ID.get()
    more = {} if request_id is None else {"request_id": request_id}
    found = problem_document(error.kind, error.detail, error.errors, **more)
    return document_page(found, request, {**error.headers, **(headers or {})})


def document_page(
    found: Mapping[str, Any], request: Request, headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    """A problem document (RFC 9457) as a page."""
    shell = shell_of(request)
    again = f"{shell.path}?{request.url.query}" if request.url.query else shell.path
    text = problem_page(found, shell, again if request.method == "GET" else None)
    return page(text, int(found["status"]), {**VARY, "Cache-Control": "no-store", **(headers or {})})


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
