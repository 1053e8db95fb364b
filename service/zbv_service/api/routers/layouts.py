"""``/v1/layouts``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from zbv_service.api.bodies import MEDIUM, read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.listing import list_response
from zbv_service.api.openapi import body_of, operation_id
from zbv_service.api.routers.search_events import (
    EVENTS_DESCRIPTION,
    EVENTS_RESPONSES,
    EventNumber,
    LastEventId,
    events_response,
)
from zbv_service.api.routers.searches import RETRY_SECONDS, SEARCH
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.documents.layouts import LayoutRequest
from zbv_service.errors import INVALID_BODY, TOO_MANY_SEARCHES, TOO_MUCH_STORED
from zbv_service.records.lists import LayoutListQuery
from zbv_service.records.searches import FINISHED, LayoutSearchDocument, LayoutSearchList, SearchEventList
from zbv_service.security.quotas import STORES
from zbv_service.security.scheme import READ

router = APIRouter(prefix="/v1/layouts", tags=["layouts"], generate_unique_id_function=operation_id)


@router.post(
    "",
    dependencies=[SEARCH, STORES["searches"]],
    summary="Search the best layouts of a model on a cluster",
    status_code=202,
    response_model=LayoutSearchDocument,
    response_description="Accepted, possibly by an earlier request: follow the Location.",
    openapi_extra=body_of(LayoutRequest),
    responses={
        200: {"model": LayoutSearchDocument, "description": "Finished earlier: the same request."},
        **documented(INVALID_BODY, TOO_MANY_SEARCHES, TOO_MUCH_STORED),
    },
)
async def submit_layouts(request: Request) -> Response:
    """Equal requests share one search, until it is cancelled, fails or is discarded."""
    found = state_of(request)
    async with read_text(request, min(MEDIUM, found.settings.max_body_bytes)) as body:
        record = await found.layouts.submit(body, caller=caller_of(request), most=most_searches(request))
    return await _response(request, record)


@router.get(
    "",
    dependencies=[READ],
    summary="List searches for layouts, newest first",
    response_model=LayoutSearchList,
)
async def list_layouts(request: Request, query: Annotated[LayoutListQuery, Query()]) -> Response:
    """Without their answers. ``next`` leads to older searches, ``previous`` to newer ones."""
    searches = state_of(request).layouts
    return await list_response(
        request,
        query,
        searches.page,
        "searches",
        LayoutSearchDocument.text,
    )


@router.get(
    "/{search_id}",
    dependencies=[READ],
    summary="Get a search for layouts",
    response_model=LayoutSearchDocument,
)
async def get_layouts(request: Request, search_id: str) -> Response:
    """The state of the search, and its answer once it has ended."""
    return await _response(request, await state_of(request).layouts.get(search_id), 200)


@router.get(
    "/{search_id}/request",
    dependencies=[READ],
    summary="Get the request of a search for layouts",
    response_description="The normalised body, for a report or for another search.",
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def get_layouts_request(request: Request, search_id: str) -> Response:
    """The request is kept as long as the search."""
    text = await state_of(request).layouts.problem_text(search_id)
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.get(
    "/{search_id}/events",
    dependencies=[READ],
    summary="Follow the events of a search for layouts",
    response_model=SearchEventList,
    response_description=EVENTS_DESCRIPTION,
    responses=EVENTS_RESPONSES,
)
async def follow_layouts(
    request: Request, search_id: str, after: EventNumber = None, last_event_id: LastEventId = None
) -> Response:
    """As the events of a search for a plan: `state`, `improvement`, `progress`, `end`."""
    record = await state_of(request).layouts.get(search_id)
    return await events_response(request, record, after, last_event_id)


@router.post(
    "/{search_id}/cancel",
    dependencies=[SEARCH],
    summary="Cancel a search for layouts",
    status_code=202,
    response_model=LayoutSearchDocument,
    response_description="It will stop soon, and keep the layouts planned so far.",
    responses={200: {"model": LayoutSearchDocument, "description": "It has ended."}},
)
async def cancel_layouts(request: Request, search_id: str) -> Response:
    """A search that has ended does not change."""
    return await _response(request, await state_of(request).layouts.cancel(search_id))


@router.delete(
    "/{search_id}",
    dependencies=[SEARCH],
    summary="Discard a search for layouts",
    status_code=204,
    response_description="The search, its answer and its events are removed.",
)
async def discard_layouts(request: Request, search_id: str) -> Response:
    """Stops and removes the search. Its plans stay, because others may use them."""
    await state_of(request).layouts.discard(search_id)
    return Response(status_code=204)


async def _response(request: Request, record: LayoutSearchDocument, status: int | None = None) -> Response:
    """A search as JSON; the default status is 200 if it has ended and 202 otherwise."""
    headers = {"Location": f"/v1/layouts/{record.id}", "Cache-Control": "no-store"}
    has_ended = record.state in FINISHED
    if not has_ended:
        headers["Retry-After"] = str(RETRY_SECONDS)
    text = await state_of(request).layouts.text(record)
    return Response(text, status or (200 if has_ended else 202), headers, "application/json")
