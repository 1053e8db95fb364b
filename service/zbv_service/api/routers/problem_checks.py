"""``/v1/problems``: check, estimate, compare and pack a problem without storing anything."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response
from zbv_solver.errors import InvalidInput

from zbv_service.api.bodies import read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.openapi import body_of, operation_id
from zbv_service.api.state import state_of
from zbv_service.errors import INFEASIBLE_MEMORY, INVALID_BODY
from zbv_service.problems.check import check_text, refused
from zbv_service.problems.documents import (
    CheckRequest,
    CompareRequest,
    Comparison,
    EstimateRequest,
    PackRequest,
    ProblemCheck,
    ProblemEstimate,
    ProblemPacking,
)
from zbv_service.problems.packing import pack_body
from zbv_service.security.access import needs

SEARCH = needs("search")

router = APIRouter(prefix="/v1/problems", tags=["problems"], generate_unique_id_function=operation_id)


@router.post(
    "/check",
    dependencies=[SEARCH],
    summary="Check a problem",
    response_model=ProblemCheck,
    response_description="Every broken rule; for a valid problem its limits, fractions and loads.",
    openapi_extra=body_of(CheckRequest),
)
async def check_problem(request: Request) -> Response:
    """Says whether `POST /v1/searches` would accept this body. A broken rule is reported with status 200."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        try:
            text = await found.computations.of_body(partial(check_text, found.settings), body)
        except InvalidInput as error:  # of the JSON itself
            text = refused(error).model_dump_json().encode()
    return Response(text, media_type="application/json")


@router.post(
    "/estimate",
    dependencies=[SEARCH],
    summary="Estimate a problem",
    response_description="The metrics of a plan, a bound, and the classical schedules.",
    openapi_extra=body_of(EstimateRequest),
    responses=documented(INVALID_BODY, INFEASIBLE_MEMORY),
)
async def estimate_problem(request: Request) -> ProblemEstimate:
    """Searches for half a second. The plan is verified but not stored."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        return await found.estimates.estimate(body)


@router.post(
    "/pack",
    dependencies=[SEARCH],
    summary="Pack a batch",
    response_model=ProblemPacking,
    response_description="The microbatches of every replica, and their problems.",
    openapi_extra=body_of(PackRequest),
    responses=documented(INVALID_BODY, INFEASIBLE_MEMORY),
)
async def pack_batch(request: Request) -> Response:
    """Chooses microbatches and replicas with brief searches. Submit the replicas' problems for plans."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        text = await pack_body(found.computations, body)
    return Response(text, media_type="application/json")


@router.post(
    "/compare",
    dependencies=[SEARCH],
    summary="Compare the classical schedules of a problem",
    response_description="The metrics of each schedule, and the best stored plan.",
    openapi_extra=body_of(CompareRequest),
    responses=documented(INVALID_BODY),
)
async def compare_problem(request: Request) -> Comparison:
    """Searches and stores nothing."""
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        return await found.comparisons.compare(body)
