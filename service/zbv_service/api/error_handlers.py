"""Turns every error of the application into an error document (RFC 9457).

This includes errors of the framework, such as unknown routes and wrong methods, and crashes.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import ContradictedBound, InvalidInput, InvalidPlan, MissingDependency

from zbv_service.database import DatabaseAway
from zbv_service.errors import (
    INTERNAL,
    INVALID_BODY,
    INVALID_PARAMETER,
    INVALID_PLAN,
    MEDIA_TYPE,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    NOT_READY,
    ApiError,
    Kind,
    contradicted,
    error_document,
    error_response,
    response_to,
)

logger = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    """Make every expected error of an application an error document; :func:`on_crash` is for the others."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(InvalidInput, _on_invalid_input)
    app.add_exception_handler(InvalidPlan, _on_invalid_plan)
    app.add_exception_handler(ContradictedBound, _on_contradicted_bound)
    app.add_exception_handler(MissingDependency, _on_missing_dependency)
    app.add_exception_handler(DatabaseAway, on_database_away)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(HTTPException, _on_http)


def documented(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI ``responses`` of a route with these kinds of errors."""
    answers: dict[int | str, dict[str, Any]] = {}
    for kind in (*kinds, INTERNAL, NOT_READY):
        schema = {"schema": {"$ref": "#/components/schemas/ErrorDetails"}}
        known = answers.setdefault(kind.status, {"description": kind.title, "content": {MEDIA_TYPE: schema}})
        if kind.title not in known["description"]:
            known["description"] += f"; or: {kind.title}"
    return answers


async def _on_api_error(_request: Request, error: Exception) -> Response:
    return response_to(cast("ApiError", error))


async def _on_invalid_input(_request: Request, error: Exception) -> Response:
    issues = cast("InvalidInput", error).issues
    errors = [{"pointer": issue.pointer, "detail": issue.detail} for issue in issues]
    return _response(INVALID_BODY, str(error), errors)


async def _on_invalid_plan(_request: Request, error: Exception) -> Response:
    return _response(INVALID_PLAN, str(error), [{"pointer": "/ranks", "detail": str(error)}])


async def _on_contradicted_bound(request: Request, error: Exception) -> Response:
    error = cast("ContradictedBound", error)
    request.app.state.metrics.contradicted_bounds.inc()
    logger.error("%s; the problem is %s", error, canonical_json(error.problem))
    return error_response(contradicted(error))


async def _on_missing_dependency(_request: Request, error: Exception) -> Response:
    return _response(NOT_IMPLEMENTED, str(error))


async def _on_parameters(_request: Request, error: Exception) -> Response:
    error = cast("RequestValidationError", error)
    errors = []
    for entry in error.errors():
        where, *names = entry["loc"]
        name = ".".join(map(str, names)) or str(where)
        message = f"found {str(entry['input'])[:60]!r}; {entry['msg'][0].lower()}{entry['msg'][1:]}."
        errors.append({"parameter": name, "detail": message})
    detail = "; ".join(f"{entry['parameter']}: {entry['detail']}" for entry in errors)
    return _response(INVALID_PARAMETER, detail, errors)


async def _on_http(request: Request, error: Exception) -> Response:
    error = cast("HTTPException", error)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        detail = f"found no {request.url.path} here; the addresses are in /openapi.json."
        return _response(NOT_FOUND, detail, headers=headers)
    if error.status_code == 405:
        headers["Allow"] = allowed = ", ".join(_allowed(request))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        detail = f"found {request.method}; {request.url.path} accepts {allowed}."
        return _response(METHOD_NOT_ALLOWED, detail, headers=headers)
    # RFC 9457, section 4.2.1: an error that means no more than its status.
    phrase = HTTPStatus(error.status_code).phrase
    plain = {"type": "about:blank", "title": phrase, "status": error.status_code}
    return error_response({**plain, "detail": str(error.detail)}, headers)


def _allowed(request: Request) -> list[str]:
    """The methods that an address accepts. Each method has its own route, so this tries them all."""
    found = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.router.routes
        )
    ]
    found = found or ["GET"]  # a mounted folder of files, where no route matches
    return [*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"]


async def on_database_away(request: Request, error: Exception) -> Response:
    """The response to a request while the database is away."""
    logger.warning("%s %s was not answered: %s", request.method, request.url.path, error)
    detail = f"The database does not answer now. {_repeating(request)}"
    return _response(NOT_READY, detail, headers={"Retry-After": "1"})


async def on_crash(request: Request, error: Exception) -> Response:
    """The response to a request that failed unexpectedly."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = f"An error of the service, not of the request; its log has the details. {_repeating(request)}"
    return _response(INTERNAL, detail)


def _response(
    kind: Kind,
    detail: str,
    errors: list[dict[str, str]] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    return error_response(error_document(kind, detail, errors), headers)


def _repeating(request: Request) -> str:
    """Advice for a request that may or may not have been carried out.

    If the answer to a commit is lost, the commit may still have succeeded; a crash may follow a commit too.
    """
    if request.method in ("GET", "HEAD"):
        return "Repeat the request in a moment."
    return (
        "The request may still have been carried out. Check first; a search may be sent again, and "
        "a run with the same Idempotency-Key."
    )
