"""``/v1/plans``."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from zbv_service.api.bodies import read_text
from zbv_service.api.caching import REVALIDATED, cached, derived
from zbv_service.api.error_handlers import documented
from zbv_service.api.listing import list_response
from zbv_service.api.openapi import body_of, content_of, operation_id
from zbv_service.api.state import state_of
from zbv_service.errors import (
    INVALID_BODY,
    INVALID_PLAN,
    MALFORMED_JSON,
    NOT_IMPLEMENTED,
    TOO_MUCH_MEMORY,
    TOO_MUCH_STORED,
)
from zbv_service.plans.documents import (
    ImportedPlan,
    PlanDocument,
    PlanSimulation,
    RankDocument,
    SimulationQuery,
)
from zbv_service.plans.plans import rank_tag
from zbv_service.records.lists import PlanListQuery
from zbv_service.records.plans import PlanList, PlanSummaryDocument
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

FETCH = needs("read", "agent")

router = APIRouter(prefix="/v1/plans", tags=["plans"], generate_unique_id_function=operation_id)

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "The client has it already."}}


@router.post(
    "",
    dependencies=[needs("search", "launch"), STORES["plans"]],
    summary="Import a plan",
    status_code=201,
    response_model=ImportedPlan,
    response_description="The plan was verified and stored.",
    openapi_extra=body_of(PlanDocument),
    responses={
        200: {"model": ImportedPlan, "description": "The plan was already stored."},
        **documented(INVALID_BODY, INVALID_PLAN, TOO_MUCH_STORED),
    },
)
async def import_plan(request: Request) -> Response:
    """The plan is verified, and its metrics are computed from its orders. A plan with a false claim is
    refused; the response lists the verified claims."""
    found = state_of(request)
    async with read_text(request, found.settings.max_plan_bytes) as body:
        answer, is_new = await found.plans.add(body, grant_of(request).name)
    headers = {"Location": f"/v1/plans/{answer.plan_id}"}
    return Response(answer.model_dump_json(), 201 if is_new else 200, headers, "application/json")


@router.get(
    "",
    dependencies=[FETCH],
    summary="List plans, newest first",
    response_model=PlanList,
)
async def list_plans(request: Request, query: Annotated[PlanListQuery, Query()]) -> Response:
    """``next`` leads to older plans, ``previous`` to newer ones. New plans do not shift the pages."""
    plans = state_of(request).plans
    return await list_response(
        request,
        query,
        plans.page,
        "plans",
        PlanSummaryDocument.text,
    )


@router.get(
    "/{plan_id}",
    dependencies=[FETCH],
    summary="Get a plan",
    response_class=Response,
    responses={
        200: content_of(PlanDocument, "The plan, which never changes."),
        **_NOT_MODIFIED,
    },
)
async def get_plan(request: Request, plan_id: str) -> Response:
    """The whole plan, with the actions of all ranks."""
    found = state_of(request)
    text = await found.plans.text(plan_id)
    found.metrics.plan_fetches.inc()
    headers, known = cached(request, plan_id)
    return known or Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{plan_id}/ranks/{rank}",
    dependencies=[FETCH],
    summary="Get the part of one rank",
    response_class=Response,
    responses={
        200: content_of(RankDocument, "The rank's part, which changes only with the version of the service."),
        **_NOT_MODIFIED,
    },
)
async def get_rank(request: Request, plan_id: str, rank: int) -> Response:
    """The rank's actions, and its transfers by peer in their order."""
    found = state_of(request)
    text = await found.plans.rank(plan_id, rank)
    found.metrics.rank_fetches.inc()
    headers, known = cached(request, rank_tag(plan_id, rank), REVALIDATED)
    return known or Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{plan_id}/simulation",
    dependencies=[READ],
    summary="Simulate a plan whose durations vary",
    response_model=PlanSimulation,
    response_description="Expected and p95 times of an iteration, of the plan and the classical schedules.",
    responses={**_NOT_MODIFIED, **documented(MALFORMED_JSON)},
)
async def simulate_plan(
    request: Request, plan_id: str, query: Annotated[SimulationQuery, Query()]
) -> Response:
    """All schedules meet the same random scenarios; ``zbv simulate`` computes the same."""
    text = await state_of(request).plans.simulation(plan_id, query)
    tag = hashlib.sha256(query.model_dump_json().encode()).hexdigest()[:16]
    headers, known = derived(request, f"{plan_id}-simulation-{tag}")
    return known or Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{plan_id}/export/{format_name}",
    dependencies=[READ],
    summary="Export a plan",
    response_class=Response,
    responses={
        200: {"description": "The plan as a file.", "content": {"*/*": {"schema": {"type": "string"}}}},
        **_NOT_MODIFIED,
        **documented(NOT_IMPLEMENTED, TOO_MUCH_MEMORY),
    },
)
async def export_plan(request: Request, plan_id: str, format_name: str) -> Response:
    """Offers the formats of ``zbv export``."""
    text, media_type, name = await state_of(request).plans.export(plan_id, format_name)
    headers, known = derived(request, f"{plan_id}-{format_name}")
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return known or Response(text, headers=headers, media_type=media_type)
