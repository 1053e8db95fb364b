"""``/v1/problems``: what can be said of a problem before it is searched. Nothing is stored."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from zbv_service.api.bodies import read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.openapi import body_of
from zbv_service.api.state import state_of
from zbv_service.errors import (
    BODY_TOO_LARGE,
    INFEASIBLE_MEMORY,
    INVALID_BODY,
    MALFORMED_JSON,
    NOT_READY,
    UNSUPPORTED_MEDIA_TYPE,
)
from zbv_service.problems.check import check_text
from zbv_service.problems.documents import CheckRequest, EstimateRequest, ProblemCheck, ProblemEstimate
from zbv_service.security.scheme import needs

SEARCH = needs("search")
_BODY_ERRORS = (MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE)

router = APIRouter(prefix="/v1/problems", tags=["problems"])


@router.post(
    "/check",
    dependencies=[SEARCH],
    operation_id="check_problem",
    summary="Whether a search would be accepted, and what its numbers mean",
    response_model=ProblemCheck,
    response_description="Every broken rule; and of a valid problem, limits, fractions and loads.",
    openapi_extra=body_of(CheckRequest),
    responses=documented(*_BODY_ERRORS),
)
async def check_problem(request: Request) -> Response:
    """The body is that of `POST /v1/searches`. One that breaks a rule is no error here: it is the answer."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        text = await found.computations.of_body(partial(check_text, found.settings), body)
    return Response(text, media_type="application/json")


@router.post(
    "/estimate",
    dependencies=[SEARCH],
    operation_id="estimate_problem",
    summary="What a moment's search reaches",
    response_description="A plan's metrics, a bound, and the classical schedules.",
    openapi_extra=body_of(EstimateRequest),
    responses=documented(*_BODY_ERRORS, INVALID_BODY, INFEASIBLE_MEMORY, NOT_READY),
)
async def estimate_problem(request: Request) -> ProblemEstimate:
    """A quick search of half a second; the plan is verified, and not stored."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        return await found.estimates.estimate(body)
