"""Errors of the service as error documents (RFC 9457): their kinds, their shape and their responses.

Every error response of the service has this shape; :mod:`zbv_service.api.error_handlers` extends that to the
errors of the framework.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema, field_serializer
from zbv_solver.errors import (
    MOST_ISSUES,
    ContradictedBound,
    InfeasibleMemory,
)

from zbv_service.observability.context import REQUEST_ID, ROOT_PATH

MEDIA_TYPE = "application/problem+json"
_PREFIX = "/errors/"


class ErrorItem(BaseModel):
    """One broken rule of a body (``pointer``) or of the address (``parameter``), or a failed ``check``."""

    pointer: str | None = Field(None, description="RFC 6901 JSON pointer into the body.")
    parameter: str | None = Field(None, description="Name of a path or query parameter.")
    check: str | None = Field(None, description="Name of a check of readiness that failed.")
    detail: str


class ErrorDetails(BaseModel):
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

    @field_serializer("type")
    def _as_address(self, name: str) -> str:
        return _address(name)


@dataclass(frozen=True)
class Kind:
    """A kind of error: its stable name, status and title."""

    name: str
    status: int
    title: str


MALFORMED_JSON = Kind("malformed-json", 400, "The body is not JSON")
UNAUTHENTICATED = Kind("unauthenticated", 401, "The request has no valid token")
INSUFFICIENT_SCOPE = Kind("insufficient-scope", 403, "The token does not allow this")
AGENT_OF_OTHERS = Kind("agent-of-others", 403, "The agent belongs to another token")
OTHER_ORIGIN = Kind("other-origin", 403, "Another site's page sent the request")
NOT_FOUND = Kind("not-found", 404, "Not found")
METHOD_NOT_ALLOWED = Kind("method-not-allowed", 405, "This address does not accept this method")
BODY_TOO_SLOW = Kind("body-too-slow", 408, "The body took too long to arrive")
CONFLICT = Kind("conflict", 409, "The state of the run or search does not allow this")
AGENT_GONE = Kind("agent-gone", 410, "The agent is lost or has left")
BODY_TOO_LARGE = Kind("body-too-large", 413, "The body is too large")
UNSUPPORTED_MEDIA_TYPE = Kind("unsupported-media-type", 415, "The body has the wrong content type")
INVALID_BODY = Kind("invalid-body", 422, "The body breaks a rule")
INVALID_PARAMETER = Kind("invalid-parameter", 422, "A parameter of the address breaks a rule")
INVALID_PLAN = Kind("invalid-plan", 422, "The plan cannot be executed as its problem demands")
INFEASIBLE_MEMORY = Kind("infeasible-memory", 422, "No plan fits the memory limit")
TOO_MUCH_MEMORY = Kind("too-much-memory", 422, "The answer takes more memory than the service allows")
TIME_LIMIT = Kind("time-limit", 422, "The time limit passed before there was a result")
TOO_MANY_SEARCHES = Kind("too-many-searches", 429, "The token has too many unfinished searches")
TOO_MUCH_STORED = Kind("too-much-stored", 429, "The token has stored too much")
INTERNAL = Kind("internal-error", 500, "The service failed")
CONTRADICTED_BOUND = Kind("contradicted-bound", 500, "A verified plan undercuts a lower bound")
SEARCH_CRASHED = Kind("search-crashed", 500, "The search process died")
RUN_FAILED = Kind("run-failed", 500, "The run failed")
NOT_IMPLEMENTED = Kind("missing-dependency", 501, "This part of the service is not installed")
NOT_READY = Kind("not-ready", 503, "The service cannot work now")


def kinds() -> dict[str, Kind]:
    """Every kind of error by its name."""
    return {value.name: value for value in globals().values() if isinstance(value, Kind)}


class ApiError(Exception):
    """Raised anywhere below a route to answer with an error document."""

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

    def __reduce__(self) -> tuple[type[ApiError], tuple[Any, ...]]:
        # Computations raise it in other processes.
        return ApiError, (self.kind, self.detail, self.errors, self.headers)


def error_document(
    kind: Kind, detail: str, errors: list[dict[str, str]] | None = None, **more: Any
) -> dict[str, Any]:
    """An error document; ``more`` are extension members."""
    found = {"type": _PREFIX + kind.name, "title": kind.title, "status": kind.status, "detail": detail}
    return {**found, **({} if errors is None else {"errors": errors}), **more}


def infeasible(error: InfeasibleMemory) -> dict[str, Any]:
    """The error document of a memory limit that no plan fits."""
    at = [
        {
            "pointer": "/problem/memory/limit",
            "detail": f"rank {rank} has {error.comparison(rank, ' and needs ')}.",
        }
        for rank in error.ranks[:MOST_ISSUES]
    ]
    return error_document(INFEASIBLE_MEMORY, str(error), at, smallest_limit=list(error.smallest))


def contradicted(error: ContradictedBound, problem: str | None = None) -> dict[str, Any]:
    """The error document of a plan that undercuts a bound; ``problem`` is the address of its problem."""
    where = "the problem that you sent" if problem is None else f"the problem at {problem}"
    detail = (
        f"A verified plan has the objective {error.objective:.17g}, below the lower bound {error.bound:.17g} "
        f"({error.source}). One of the two is wrong, so no plan is returned. This is a bug in zbv: please "
        f"report it with {where}."
    )
    found = error_document(
        CONTRADICTED_BOUND,
        detail,
        objective=error.objective,
        lower_bound=error.bound,
        source=error.source,
    )
    return found if problem is None else {**found, "problem": problem}


def located(document: dict[str, Any]) -> dict[str, Any]:
    """An error document with its type as an address below the root path of the current request."""
    return {**document, "type": _address(document["type"])}


def _address(name: str) -> str:
    """The address of a type; ``about:blank`` has no page."""
    return ROOT_PATH.get() + name if name.startswith("/") else name


StoredError = Annotated[
    dict[str, Any], PlainSerializer(located), WithJsonSchema({"$ref": "#/components/schemas/ErrorDetails"})
]
"""An error document in the database; it is sent with its type as an address."""


def error_response(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """An answer that carries an error document."""
    content = located(content)
    request_id = REQUEST_ID.get()
    if request_id is not None:
        content = {**content, "request_id": request_id}
    # ASCII, because what we quote from a body may hold half a surrogate pair, which is no UTF-8.
    return Response(json.dumps(content), content["status"], headers, MEDIA_TYPE)


def response_to(error: ApiError) -> Response:
    """The answer that a raised error stands for."""
    return error_response(error_document(error.kind, error.detail, error.errors), error.headers)
