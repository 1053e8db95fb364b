"""``/v1/searches/{search_id}/events``: as a stream of server-sent events, or as a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, cast

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.sse import format_sse_event

from zbv_service.api.event_streams import RETRY, EventStream, encoded
from zbv_service.api.negotiation import EVENT_STREAM, JSON, VARY, accepts
from zbv_service.api.openapi import operation_id
from zbv_service.api.state import state_of
from zbv_service.records.searches import FINISHED, SearchEventDocument, SearchEventList, SearchRecord
from zbv_service.security.scheme import READ, READ_SCOPES

_MAX_NUMBER = 2**31 - 1

router = APIRouter(prefix="/v1/searches", tags=["searches"], generate_unique_id_function=operation_id)

EventNumber = Annotated[
    int | None, Query(ge=0, le=_MAX_NUMBER, description="Return only events after this one.")
]
LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=_MAX_NUMBER, description="As `after`; browsers send it."),
]

EVENTS_DESCRIPTION = "The events so far, or a stream of them that ends after the event `end`."
EVENTS_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            EVENT_STREAM: {
                "schema": {"type": "string"},
                "example": 'event: end\ndata: {"id":9,"event":"end","state":"done"}\nid: 9\n\n',
            }
        }
    },
    204: {"description": "No event follows, because the search has ended. Do not reconnect."},
}


@router.get(
    "/{search_id}/events",
    dependencies=[READ],
    summary="Follow the events of a search",
    response_model=SearchEventList,
    response_description=EVENTS_DESCRIPTION,
    responses=EVENTS_RESPONSES,
)
async def follow_search(
    request: Request, search_id: str, after: EventNumber = None, last_event_id: LastEventId = None
) -> Response:
    """Typed events, numbered within the search: `state`, `improvement`, `bound`, `progress`, `end`.

    A broken stream resumes after `Last-Event-ID`, at any service on the same database. With
    `Accept: application/json`, or `after`, the same events are a list.
    """
    record = await state_of(request).searches.get(search_id)
    return await events_response(request, record, after, last_event_id)


async def events_response(
    request: Request, record: SearchRecord, after: int | None, last_event_id: int | None
) -> Response:
    """The events of a search, as a stream or as a list."""
    found, search_id = state_of(request), record.id
    number = max(after or 0, last_event_id or 0)
    is_list = accepts(request, JSON) or after is not None
    if is_list and not accepts(request, EVENT_STREAM):
        events = await found.events.since(search_id, number)
        text = await asyncio.to_thread(_listed, record, number, events)
        return Response(text, headers={**VARY, "Cache-Control": "no-store"}, media_type=JSON)
    if record.state in FINISHED and not await found.events.since(search_id, number):
        return Response(status_code=204, headers=VARY)
    return EventStream(_stream(request, search_id, number))


def _listed(record: SearchRecord, number: int, events: list[SearchEventDocument]) -> str:
    return SearchEventList(
        search_id=record.id,
        events=events,
        last_id=events[-1].id if events else number,
        is_over=record.state in FINISHED or (bool(events) and events[-1].event == "end"),
    ).model_dump_json(exclude_unset=True)


async def _stream(request: Request, search_id: str, number: int) -> AsyncIterator[bytes]:
    """Stream events until the search ends or the token becomes invalid; a reconnecting reader learns why."""
    found = state_of(request)
    yield RETRY
    async with aclosing(cast("Any", found.events.follow(search_id, number))) as batches:
        async for batch in batches:
            if not await found.access.is_still_allowed(request, READ_SCOPES):
                return
            yield await encoded(_encoded, batch)


def _encoded(event: SearchEventDocument) -> bytes:
    text = event.model_dump_json(exclude_unset=True)
    return format_sse_event(event=event.event, id=str(event.id), data_str=text)
