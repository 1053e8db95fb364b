"""Errors as RFC 9457 problem documents: their types, their one shape, and the handlers that make them.

Every answer of the service that is not what was asked for has this shape, those of the framework
(unknown routes, wrong methods, crashes) included.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match
from zbv_solver.errors import (
    MOST_ISSUES,
    ContradictedBound,
    InfeasibleMemory,
    InvalidInput,
    InvalidPlan,
    MissingDependency,
)
from zbv_solver.problem.stage_document import canonical_json

from zbv_service.observability.context import REQUEST_ID

MEDIA_TYPE = "application/problem+json"
_PREFIX = "/problems/"

logger = logging.getLogger(__name__)


class ErrorItem(BaseModel):
    """One broken rule of a body (``pointer``) or of the address (``parameter``), or a failed ``check``."""

    pointer: str | None = Field(None, description="RFC 6901 JSON pointer into the body.")
    parameter: str | None = Field(None, description="Name of a path or query parameter.")
    check: str | None = Field(None, description="Name of a check of readiness that failed.")
    detail: str


class ProblemDetails(BaseModel):
    """An error (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Names the kind of error, for good; the address of a page about it.")
    title: str
    status: int
    detail: str = Field(description="What was found, what the rule is, and what to do.")
    errors: list[ErrorItem] | None = Field(None, description="One entry per broken rule.")
    request_id: str | None = Field(
        None, description="Names the request in the service's log; also in X-Request-ID."
    )


@dataclass(frozen=True)
class Kind:
    """A kind of error: its stable name, status and title."""

    name: str
    status: int
    title: str


MALFORMED_REQUEST = Kind("malformed-request", 400, "The request is not HTTP")
MALFORMED_JSON = Kind("malformed-json", 400, "The body is not JSON")
INVALID_IDEMPOTENCY_KEY = Kind("invalid-idempotency-key", 400, "The Idempotency-Key breaks a rule")
UNAUTHENTICATED = Kind("unauthenticated", 401, "The request does not say who sends it")
INSUFFICIENT_SCOPE = Kind("insufficient-scope", 403, "The token does not allow this")
AGENT_OF_OTHERS = Kind("agent-of-others", 403, "The agent belongs to another token")
OTHER_ORIGIN = Kind("other-origin", 403, "Another site's page sent the request")
NOT_FOUND = Kind("not-found", 404, "There is no such thing")
METHOD_NOT_ALLOWED = Kind("method-not-allowed", 405, "This address does not take this method")
BODY_TOO_SLOW = Kind("body-too-slow", 408, "The body took too long to arrive")
RUN_STATE = Kind("run-state", 409, "The run is in no state for this")
SEARCH_IN_USE = Kind("search-in-use", 409, "A run waits for the search")
IDEMPOTENCY_KEY_IN_USE = Kind(
    "idempotency-key-in-use", 409, "A request with this Idempotency-Key is being answered"
)
SEARCH_DISCARDED = Kind("search-discarded", 410, "The search that this Idempotency-Key named was discarded")
RUN_REMOVED = Kind("run-removed", 410, "The run that this Idempotency-Key named was removed")
AGENT_GONE = Kind("agent-gone", 410, "The agent is lost or has left")
ADDRESS_TOO_LONG = Kind("address-too-long", 414, "The address is too long")
HEADERS_TOO_LARGE = Kind("headers-too-large", 431, "The header fields are too large")
BODY_TOO_LARGE = Kind("body-too-large", 413, "The body is too large")
UNSUPPORTED_MEDIA_TYPE = Kind("unsupported-media-type", 415, "The body has the wrong content type")
INVALID_BODY = Kind("invalid-body", 422, "The body breaks a rule")
INVALID_PARAMETER = Kind("invalid-parameter", 422, "A parameter of the address breaks a rule")
IDEMPOTENCY_KEY_REUSED = Kind("idempotency-key-reused", 422, "The Idempotency-Key belongs to another request")
INVALID_PLAN = Kind("invalid-plan", 422, "The plan cannot be executed as its problem demands")
INFEASIBLE_MEMORY = Kind("infeasible-memory", 422, "No plan fits the memory limit")
UNKNOWN_HOST = Kind("unknown-host", 421, "The service has no such name")
TOO_MANY_SEARCHES = Kind("too-many-searches", 429, "The token has too many unfinished searches")
TOO_MANY_ATTEMPTS = Kind("too-many-attempts", 429, "A wrong token came from this address too often")
INTERNAL = Kind("internal-error", 500, "The service failed")
CONTRADICTED_BOUND = Kind("contradicted-bound", 500, "A verified plan undercuts a lower bound")
SEARCH_CRASHED = Kind("search-crashed", 500, "The search process died")
RUN_FAILED = Kind("run-failed", 500, "The run failed")
NOT_IMPLEMENTED = Kind("missing-dependency", 501, "This part of the service is not installed")
NOT_READY = Kind("not-ready", 503, "The service cannot work now")
TOO_MANY_CONNECTIONS = Kind("too-many-connections", 503, "The service has too many connections")


def kinds() -> dict[str, Kind]:
    """Every kind of error by its name."""
    return {value.name: value for value in globals().values() if isinstance(value, Kind)}


class ProblemError(Exception):
    """Raised anywhere below a route to answer with a problem document."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        errors: list[dict[str, str]] | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.errors = errors
        self.headers = headers or {}

    def __reduce__(self) -> tuple[type[ProblemError], tuple[Any, ...]]:
        # Computations raise it in other processes.
        return ProblemError, (self.kind, self.detail, self.errors, self.headers)


def document(
    kind: Kind, detail: str, errors: list[dict[str, str]] | None = None, **more: Any
) -> dict[str, Any]:
    """A problem document; ``more`` are extension members."""
    found = {"type": _PREFIX + kind.name, "title": kind.title, "status": kind.status, "detail": detail}
    return {**found, **({} if errors is None else {"errors": errors}), **more}


def infeasible(error: InfeasibleMemory) -> dict[str, Any]:
    """The problem document of a memory limit that no plan fits."""
    at = [
        {
            "pointer": "/problem/memory/limit",
            "detail": f"rank {rank} has {error.limits[rank]:.15g} and needs {error.smallest[rank]:.15g}.",
        }
        for rank in error.ranks[:MOST_ISSUES]
    ]
    return document(INFEASIBLE_MEMORY, str(error), at, smallest_limit=list(error.smallest))


def contradicted(error: ContradictedBound, problem: str | None = None) -> dict[str, Any]:
    """The problem document of a plan that undercuts a bound; ``problem`` is the address of its problem."""
    where = "the problem that you sent" if problem is None else f"the problem at {problem}"
    detail = (
        f"A verified plan has the objective {error.objective:.17g}, below the lower bound {error.bound:.17g} "
        f"({error.source}). One of the two is wrong, so no plan is returned. This is a bug in zbv: please "
        f"report it with {where}."
    )
    found = document(
        CONTRADICTED_BOUND,
        detail,
        objective=error.objective,
        lower_bound=error.bound,
        source=error.source,
    )
    return found if problem is None else {**found, "problem": problem}


def response(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """An answer that carries a problem document."""
    request_id = REQUEST_ID.get()
    if request_id is not None:
        content = {**content, "request_id": request_id}
    # ASCII, because what we quote from a body may hold half a surrogate pair, which is no UTF-8.
    return Response(json.dumps(content), content["status"], headers, MEDIA_TYPE)


def answer_to(error: ProblemError) -> Response:
    """The answer that a raised problem stands for."""
    return response(document(error.kind, error.detail, error.errors), error.headers)


def install(app: FastAPI) -> None:
    """Make every error of an application a problem document."""
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(InvalidInput, _on_invalid_input)
    app.add_exception_handler(InvalidPlan, _on_invalid_plan)
    app.add_exception_handler(ContradictedBound, _on_contradicted_bound)
    app.add_exception_handler(MissingDependency, _on_missing_dependency)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_crash)


def documented(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that can answer with these kinds of errors."""
    answers: dict[int | str, dict[str, Any]] = {}
    for kind in (*kinds, INTERNAL, NOT_READY):
        schema = {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}
        known = answers.setdefault(kind.status, {"description": kind.title, "content": {MEDIA_TYPE: schema}})
        if kind.title not in known["description"]:
            known["description"] += f"; or: {kind.title}"
    return answers


async def _on_problem(_request: Request, error: Exception) -> Response:
    return answer_to(cast("ProblemError", error))  # registered for this class alone


async def _on_invalid_input(_request: Request, error: Exception) -> Response:
    error = cast("InvalidInput", error)
    errors = [{"pointer": issue.pointer, "detail": issue.detail} for issue in error.issues]
    return response(document(INVALID_BODY, str(error), errors))


async def _on_invalid_plan(_request: Request, error: Exception) -> Response:
    return response(document(INVALID_PLAN, str(error), [{"pointer": "/ranks", "detail": str(error)}]))


async def _on_contradicted_bound(request: Request, error: Exception) -> Response:
    error = cast("ContradictedBound", error)
    request.app.state.metrics.bound_contradicted()
    logger.error("%s; the problem is %s", error, canonical_json(error.problem))
    return response(contradicted(error))


async def _on_missing_dependency(_request: Request, error: Exception) -> Response:
    return response(document(NOT_IMPLEMENTED, str(error)))


async def _on_parameters(_request: Request, error: Exception) -> Response:
    error = cast("RequestValidationError", error)
    errors = []
    for entry in error.errors():
        where, *names = entry["loc"]
        name = ".".join(map(str, names)) or str(where)
        message = f"found {str(entry['input'])[:60]!r}; {entry['msg'][0].lower()}{entry['msg'][1:]}."
        errors.append({"parameter": name, "detail": message})
    detail = "; ".join(f"{entry['parameter']}: {entry['detail']}" for entry in errors)
    return response(document(INVALID_PARAMETER, detail, errors))


async def _on_http(request: Request, error: Exception) -> Response:
    error = cast("HTTPException", error)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        detail = f"found no {request.url.path} here; the addresses are in /openapi.json."
        return response(document(NOT_FOUND, detail), headers)
    if error.status_code == 405:
        headers["Allow"] = allowed = ", ".join(_allowed(request))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        detail = f"found {request.method}; {request.url.path} takes {allowed}."
        return response(document(METHOD_NOT_ALLOWED, detail), headers)
    known = {413: BODY_TOO_LARGE}.get(error.status_code)
    if known is not None:
        return response(document(known, str(error.detail)), headers)
    # RFC 9457: a problem that means no more than its status.
    phrase = HTTPStatus(error.status_code).phrase
    plain = {"type": "about:blank", "title": phrase, "status": error.status_code}
    return response({**plain, "detail": str(error.detail)}, headers)


def _allowed(request: Request) -> list[str]:
    """The methods that an address takes; every route has its own, so all are asked."""
    found = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.router.routes
        )
    ]
    found = found or ["GET"]  # inside a mounted folder of files, where our routes do not match
    return [*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"]


async def on_database_away(request: Request, error: Exception) -> Response:
    """The answer to a request that needed the database when it was away."""
    logger.warning("%s %s was not answered: %s", request.method, request.url.path, error)
    detail = f"The database does not answer now. {_repeating(request)}"
    return response(document(NOT_READY, detail), {"Retry-After": "1"})


async def _on_crash(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    detail = f"An error of the service, not of the request; its log has the details. {_repeating(request)}"
    return response(document(INTERNAL, detail))


def _repeating(request: Request) -> str:
    """What to do about a request of which nobody knows whether it was carried out.

    A commit whose answer was lost has changed the database all the same, and a crash may come after one.
    """
    if request.method in ("GET", "HEAD"):
        return "Repeat the request in a moment."
    return (
        "The request may have been carried out all the same. Look first, or repeat it with the same "
        "Idempotency-Key where it had one (POST /v1/searches, POST /v1/runs)."
    )
