"""``/v1/plans``, with a short cut for the parts of ranks.

Thousands of ranks fetch their parts at the same time. Routing, dependencies and response models would take
longer than the rest of such a request, so :class:`RankFetches` serves parts that are in memory itself.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from zbv_service.api.bodies import read_text
from zbv_service.api.error_handlers import documented, on_database_away
from zbv_service.api.listing import list_response
from zbv_service.api.openapi import body_of, content_of, operation_id
from zbv_service.api.state import state_of
from zbv_service.database import DatabaseAway
from zbv_service.errors import (
    INVALID_BODY,
    INVALID_PLAN,
    MALFORMED_JSON,
    NOT_IMPLEMENTED,
    TOO_MUCH_MEMORY,
    TOO_MUCH_STORED,
    ApiError,
    response_to,
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
from zbv_service.security.access import READ, needs, scopes_of
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

FETCH = needs("read", "agent")

router = APIRouter(prefix="/v1/plans", tags=["plans"], generate_unique_id_function=operation_id)

IMMUTABLE = "private, max-age=31536000, immutable"
"""Resources stored under their hash. Private, because a shared cache would not check tokens."""
REVALIDATED = "private, no-cache"
"""Resources that this version derives from stored ones; clients revalidate them with the ETag."""
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
    """``next`` leads to older plans. New plans do not shift the pages."""
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


def cached(request: Request, etag: str, control: str = IMMUTABLE) -> tuple[dict[str, str], Response | None]:
    """The headers of a response that may be kept, and the 304 response if the client has it already."""
    quoted = f'"{etag}"'
    headers = {"ETag": quoted, "Cache-Control": control}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    is_known = quoted in known or "*" in known
    return headers, Response(status_code=304, headers=headers) if is_known else None


def derived(request: Request, etag: str) -> tuple[dict[str, str], Response | None]:
    """As :func:`cached`, for content that this version derives from an immutable resource.

    A later version may derive something else. So clients must revalidate the response, unless its address
    names this version (``?v=``).
    """
    assets = state_of(request).assets
    is_versioned = request.query_params.get("v") == assets
    return cached(request, f"{etag}-{assets}", IMMUTABLE if is_versioned else REVALIDATED)


_PATH = re.compile(r"/v1/plans/([0-9a-f]{64})/ranks/(0|[1-9][0-9]{0,5})")
_ROUTE = next(route for route in router.routes if isinstance(route, APIRoute) and route.endpoint is get_rank)
_SCOPES = scopes_of(_ROUTE) or ()


class RankFetches:
    """Middleware that serves parts of ranks that are in memory; the caller needs the scopes of the route."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        address = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if address is None or scope["method"] != "GET" or scope.get("root_path"):
            await self._app(scope, receive, send)
            return
        application = scope["app"].state.application
        plan_id, rank = address[1], int(address[2])
        body = application.plans.known_rank(plan_id, rank)
        if body is None or any(name == b"if-none-match" for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        scope["route"] = _ROUTE
        request = Request(scope)
        try:
            await application.access.require(request, _SCOPES)
        except ApiError as error:
            await response_to(error)(scope, receive, send)
            return
        except DatabaseAway as error:
            await (await on_database_away(request, error))(scope, receive, send)
            return
        application.metrics.rank_fetches.inc()
        headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
            (b"etag", f'"{rank_tag(plan_id, rank)}"'.encode()),
            (b"cache-control", REVALIDATED.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
