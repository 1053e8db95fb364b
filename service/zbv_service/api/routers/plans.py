"""``/v1/plans``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from zbv_service.api.bodies import read_text
from zbv_service.api.caching import REVALIDATED
from zbv_service.api.cursors import neighbours, position_of
from zbv_service.api.error_handlers import documented
from zbv_service.api.listing import PlanListQuery, page_at
from zbv_service.api.negotiation import VARY, wants_page
from zbv_service.api.openapi import body_of, content_of
from zbv_service.api.state import SEE_PAGE, cached, derived, immutable, state_of
from zbv_service.errors import (
    BODY_TOO_LARGE,
    INVALID_BODY,
    INVALID_PARAMETER,
    INVALID_PLAN,
    MALFORMED_JSON,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    UNSUPPORTED_MEDIA_TYPE,
)
from zbv_service.plans.documents import (
    ImportedPlan,
    PlanDocument,
    PlanList,
    PlanSummaryDocument,
    RankDocument,
)
from zbv_service.plans.plans import rank_tag
from zbv_service.security.scheme import READ, needs

STORE = needs("search", "launch")
FETCH = needs("read", "agent")

router = APIRouter(prefix="/v1/plans", tags=["plans"])

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "The caller has it already."}}


@router.post(
    "",
    operation_id="import_plan",
    dependencies=[STORE],
    summary="Store a plan made elsewhere",
    status_code=201,
    response_model=ImportedPlan,
    response_description="Verified and stored.",
    openapi_extra=body_of(PlanDocument),
    responses={
        200: {"model": ImportedPlan, "description": "It was there already."},
        **documented(MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, INVALID_BODY, INVALID_PLAN),
    },
)
async def import_plan(request: Request) -> Response:
    """The plan is verified, and what is stored is computed from its orders. A plan with a false claim is
    refused; the answer lists which of its claims were verified."""
    found = state_of(request)
    async with read_text(request, found.settings.max_plan_bytes) as body:
        answer, is_new = await found.plans.add(body)
    headers = {"Location": f"/v1/plans/{answer.plan_id}"}
    return Response(answer.model_dump_json(), 201 if is_new else 200, headers, "application/json")


@router.get(
    "",
    operation_id="list_plans",
    dependencies=[FETCH],
    summary="Plans, the newest first",
    response_model=PlanList,
    responses={**SEE_PAGE, **documented(INVALID_PARAMETER)},
)
async def list_plans(request: Request, query: Annotated[PlanListQuery, Query()]) -> Response:
    """By pages: ``next`` leads to older ones, ``previous`` to newer ones. New ones shift nothing."""
    if wants_page(request):
        return page_at(request, "/plans")
    found = state_of(request)
    async with found.computations.listing(query.limit):
        page = await found.plans.page(query.filter, query.limit, position_of(query.cursor))
    around = neighbours(request, page)

    def write() -> str:
        plans = [PlanSummaryDocument.of(summary) for summary in page.items]
        return PlanList(plans=plans, next=around.next, previous=around.previous).model_dump_json()

    text = await found.computations.write(write)
    headers = {**VARY, **around.fields, "Cache-Control": "no-store"}
    return Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{plan_id}",
    operation_id="get_plan",
    dependencies=[FETCH],
    summary="A plan",
    response_class=Response,
    responses={
        200: content_of(PlanDocument, "The plan; it never changes."),
        **SEE_PAGE,
        **_NOT_MODIFIED,
        **documented(NOT_FOUND),
    },
)
async def get_plan(request: Request, plan_id: str) -> Response:
    """The whole plan, with every rank's actions."""
    if wants_page(request):
        return page_at(request, f"/plans/{plan_id}")
    found = state_of(request)
    text = await found.plans.text(plan_id)
    found.metrics.plan_fetches.inc()
    headers, known = immutable(request, plan_id, VARY)
    return known or Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{plan_id}/ranks/{rank}",
    operation_id="get_rank",
    dependencies=[FETCH],
    summary="One rank's part of a plan",
    response_class=Response,
    responses={
        200: content_of(RankDocument, "The rank's part; it changes with the version of the service at most."),
        **_NOT_MODIFIED,
        **documented(NOT_FOUND, INVALID_PARAMETER),
    },
)
async def get_rank(request: Request, plan_id: str, rank: int) -> Response:
    """Its actions, and what it exchanges with which peers in which order."""
    found = state_of(request)
    text = await found.plans.rank(plan_id, rank)
    found.metrics.rank_fetches.inc()
    headers, known = cached(request, rank_tag(plan_id, rank), REVALIDATED)
    return known or Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{plan_id}/export/{format_name}",
    operation_id="export_plan",
    dependencies=[READ],
    summary="A plan in another format",
    response_class=Response,
    responses={
        200: {"description": "The plan, as a file.", "content": {"*/*": {"schema": {"type": "string"}}}},
        **_NOT_MODIFIED,
        **documented(NOT_FOUND, NOT_IMPLEMENTED),
    },
)
async def export_plan(request: Request, plan_id: str, format_name: str) -> Response:
    """The formats of ``zbv export``."""
    text, media_type, name = await state_of(request).plans.export(plan_id, format_name)
    headers, known = derived(request, f"{plan_id}-{format_name}")
    headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return known or Response(text, headers=headers, media_type=media_type)
