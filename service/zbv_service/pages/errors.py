"""Errors as pages, and ``/errors/{name}``: the meaning of a type of error, linked from every error."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from http.client import responses
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from zbv_service.api.error_advice import ADVICE
from zbv_service.api.negotiation import VARY, root_of, wants_page
from zbv_service.errors import MEDIA_TYPE, NOT_FOUND, ApiError, kinds
from zbv_service.pages.shell import NO_STORE, html, render, shell_of
from zbv_service.security.access import ANYBODY

_PASSING = frozenset({429, 500, 503})
"""Statuses of errors that may be temporary."""
_WRONG_PARAMETERS = 422
_KEPT_HEADERS = ("retry-after", "www-authenticate", "allow", "connection")

Handler = Callable[[Request, Exception], Response | Awaitable[Response]]

router = APIRouter(include_in_schema=False)


def install(app: FastAPI) -> None:
    """Show browsers the errors of an application as pages. Call this after adding all error handlers."""
    for key, handler in list(app.exception_handlers.items()):
        app.add_exception_handler(key, as_page(cast("Handler", handler)))


@router.get("/errors/{name}", dependencies=[ANYBODY])
async def get_error_type(request: Request, name: str) -> HTMLResponse:
    """The page of one type."""
    kind = kinds().get(name)
    if kind is None:
        raise ApiError(NOT_FOUND, f"found no type of error {name!r}; there are {', '.join(kinds())}.")
    content = render("error_type.html.j2", shell_of(request), name=name, kind=kind, advice=ADVICE[name])
    return html(content, headers={"Cache-Control": "public, max-age=3600"})


def as_page(handler: Handler) -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler of an error, except that browsers get the error document as a page."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = handler(request, error)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer.media_type != MEDIA_TYPE or not wants_page(request):
            return answer
        headers = {name: answer.headers[name] for name in _KEPT_HEADERS if name in answer.headers}
        document = json.loads(bytes(answer.body))
        document["type"] = document["type"].removeprefix(root_of(request))  # pages add it themselves
        return _error_page(document, request, headers)

    return handle


def _error_page(document: Mapping[str, Any], request: Request, headers: Mapping[str, str]) -> HTMLResponse:
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
