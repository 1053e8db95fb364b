"""``/v1/searches``, and ``/v1/layouts`` for requests of another kind of search."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.sse import format_sse_event

from zbv_service.api import event_streams
from zbv_service.api.bodies import MEDIUM, read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.event_streams import EventNumber, LastEventId
from zbv_service.api.listing import list_response
from zbv_service.api.negotiation import EVENT_STREAM, JSON, accepts
from zbv_service.api.openapi import body_of, operation_id
from zbv_service.api.state import state_of
from zbv_service.database.events import KEPT_EVENTS
from zbv_service.documents.layouts import LayoutRequest
from zbv_service.documents.problems import SearchRequest
from zbv_service.errors import (
    CONFLICT,
    INVALID_BODY,
    TOO_MANY_SEARCHES,
    TOO_MUCH_STORED,
)
from zbv_service.records.lists import SearchListQuery
from zbv_service.records.searches import (
    FINISHED,
    AnySearch,
    LayoutSearchDocument,
    SearchDocument,
    SearchEventDocument,
    SearchEventList,
    SearchList,
    SearchRecord,
)
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

RETRY_SECONDS = 1
SEARCH = needs("search")

router = APIRouter(prefix="/v1", tags=["searches"], generate_unique_id_function=operation_id)


@router.post(
    "/searches",
    dependencies=[SEARCH, STORES["searches"]],
    summary="Search a plan for a problem",
    status_code=202,
    response_model=SearchDocument,
    response_description="Accepted, possibly by an earlier request: follow the Location.",
    openapi_extra=body_of(SearchRequest),
    responses={
        200: {"model": SearchDocument, "description": "Finished earlier: the same problem and options."},
        **documented(INVALID_BODY, TOO_MANY_SEARCHES, TOO_MUCH_STORED),
    },
)
async def submit_search(request: Request) -> Response:
    """Equal problems with equal options share one search, until it is cancelled, fails or is discarded."""
    state = state_of(request)
    async with read_text(request, state.settings.max_body_bytes) as body:
        record = await state.searches.submit(body, grant_of(request))
    return await _response(request, record)


@router.post(
    "/layouts",
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
    state = state_of(request)
    async with read_text(request, min(MEDIUM, state.settings.max_body_bytes)) as body:
        record = await state.searches.submit(body, grant_of(request), "layouts")
    return await _response(request, record)


@router.get(
    "/searches",
    dependencies=[READ],
    summary="List searches, newest first",
    response_model=SearchList,
)
async def list_searches(request: Request, query: Annotated[SearchListQuery, Query()]) -> Response:
    """``next`` leads to older searches. New searches do not shift the pages."""
    return await list_response(request, query, state_of(request).searches.page, "searches", SearchRecord.text)


@router.get(
    "/searches/{search_id}",
    dependencies=[READ],
    summary="Get a search",
    response_model=AnySearch,
)
async def get_search(request: Request, search_id: str) -> Response:
    """The state of the search, and the best plan so far; of a search for layouts, also its answer."""
    return await _response(request, await state_of(request).searches.get(search_id), 200)


@router.get(
    "/searches/{search_id}/problem",
    dependencies=[READ],
    summary="Get the problem of a search",
    response_description="The normalised problem document, for a report or for another search; of a search "
    "for layouts, its whole request.",
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def get_search_problem(request: Request, search_id: str) -> Response:
    """The problem is kept as long as the search."""
    text = await state_of(request).searches.problem_text(search_id)
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.get(
    "/searches/{search_id}/events",
    dependencies=[READ],
    summary="Follow the events of a search",
    response_model=SearchEventList,
    response_description=event_streams.DESCRIPTION,
    responses=event_streams.responses(
        "search", 'event: end\ndata: {"id":9,"event":"end","state":"done"}\nid: 9\n\n'
    ),
)
async def follow_search(
    request: Request, search_id: str, after: EventNumber = None, last_event_id: LastEventId = None
) -> Response:
    """Typed events, numbered within the search: `state`, `improvement`, `bound`, `progress`, `end`.

    A broken stream resumes after `Last-Event-ID`, at any service on the same database. With
    `Accept: application/json`, or `after`, the same events are a list.
    """
    found, number = state_of(request), max(after or 0, last_event_id or 0)
    record = await found.searches.get(search_id)
    is_over, is_list = record.state in FINISHED, accepts(request, JSON) or after is not None
    if is_list and not accepts(request, EVENT_STREAM):
        async with found.computations.listing(KEPT_EVENTS):
            events = await found.events.since(search_id, number)
            return await event_streams.listed(partial(SearchEventList.of, search_id, events, number, is_over))
    if is_over and not await found.events.since(search_id, number):
        return event_streams.over()
    return event_streams.followed(request, found.events, search_id, number, _encoded)


@router.post(
    "/searches/{search_id}/cancel",
    dependencies=[SEARCH],
    summary="Cancel a search",
    status_code=202,
    response_model=AnySearch,
    response_description="It will stop soon, and keep its best plan, or the layouts planned so far.",
    responses={200: {"model": AnySearch, "description": "It has ended."}},
)
async def cancel_search(request: Request, search_id: str) -> Response:
    """A search that has ended does not change."""
    return await _response(request, await state_of(request).searches.cancel(search_id))


@router.delete(
    "/searches/{search_id}",
    dependencies=[SEARCH],
    summary="Discard a search",
    status_code=204,
    response_description="The search and its events are removed, also for all others who use it.",
    responses=documented(CONFLICT),
)
async def discard_search(request: Request, search_id: str) -> Response:
    """Stops and removes the search. Its plans stay, because others may use them."""
    await state_of(request).searches.discard(search_id)
    return Response(status_code=204)


def _encoded(event: SearchEventDocument) -> bytes:
    text = event.model_dump_json(exclude_unset=True)
    return format_sse_event(event=event.event, id=str(event.id), data_str=text)


async def _response(request: Request, record: SearchRecord, status: int | None = None) -> Response:
    """A search as JSON; the default status is 200 if it has ended and 202 otherwise."""
    headers = {"Location": f"/v1/searches/{record.id}", "Cache-Control": "no-store"}
    has_ended = record.state in FINISHED
    if not has_ended:
        headers["Retry-After"] = str(RETRY_SECONDS)
    text = await state_of(request).searches.text(record)
    return Response(text, status or (200 if has_ended else 202), headers, "application/json")
