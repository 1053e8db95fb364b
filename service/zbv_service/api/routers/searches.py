"""``/v1/searches``."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from zbv_service.api.bodies import read_text
from zbv_service.api.error_handlers import documented
from zbv_service.api.listing import list_response
from zbv_service.api.openapi import body_of, operation_id
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.errors import (
    INVALID_BODY,
    SEARCH_IN_USE,
    TOO_MANY_SEARCHES,
    TOO_MUCH_STORED,
)
from zbv_service.records.lists import SearchListQuery
from zbv_service.records.searches import FINISHED, SearchDocument, SearchList
from zbv_service.searches.searches import SearchRequest
from zbv_service.security.quotas import STORES
from zbv_service.security.scheme import READ, needs

RETRY_SECONDS = 1
SEARCH = needs("search")

router = APIRouter(prefix="/v1/searches", tags=["searches"], generate_unique_id_function=operation_id)


@router.post(
    "",
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
    found = state_of(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        record = await found.searches.submit(body, caller=caller_of(request), most=most_searches(request))
    return await _response(record)


@router.get(
    "",
    dependencies=[READ],
    summary="List searches, newest first",
    response_model=SearchList,
)
async def list_searches(request: Request, query: Annotated[SearchListQuery, Query()]) -> Response:
    """``next`` leads to older searches, ``previous`` to newer ones. New searches do not shift the pages."""
    searches = state_of(request).searches
    return await list_response(
        request,
        query,
        searches.page,
        "searches",
        SearchDocument.text,
    )


@router.get(
    "/{search_id}",
    dependencies=[READ],
    summary="Get a search",
    response_model=SearchDocument,
)
async def get_search(request: Request, search_id: str) -> Response:
    """The state of the search, and the best plan so far."""
    searches = state_of(request).searches
    record = await searches.get(search_id)
    return await _response(await searches.placed(record), 200)


@router.get(
    "/{search_id}/problem",
    dependencies=[READ],
    summary="Get the problem of a search",
    response_description="The normalised problem document, for a report or for another search.",
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
)
async def get_search_problem(request: Request, search_id: str) -> Response:
    """The problem is kept as long as the search."""
    text = await state_of(request).searches.problem_text(search_id)
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.post(
    "/{search_id}/cancel",
    dependencies=[SEARCH],
    summary="Cancel a search",
    status_code=202,
    response_model=SearchDocument,
    response_description="It will stop soon, and keep its best plan.",
    responses={200: {"model": SearchDocument, "description": "It has ended."}},
)
async def cancel_search(request: Request, search_id: str) -> Response:
    """A search that has ended does not change."""
    return await _response(await state_of(request).searches.cancel(search_id))


@router.delete(
    "/{search_id}",
    dependencies=[SEARCH],
    summary="Discard a search",
    status_code=204,
    response_description="The search and its events are removed, also for all others who use it.",
    responses=documented(SEARCH_IN_USE),
)
async def discard_search(request: Request, search_id: str) -> Response:
    """Stops and removes the search. Its plan stays, because others may use it."""
    await state_of(request).searches.discard(search_id)
    return Response(status_code=204)


async def _response(record: SearchDocument, status: int | None = None) -> Response:
    """A search as JSON; the default status is 200 if it has ended and 202 otherwise."""
    headers = {"Location": f"/v1/searches/{record.id}", "Cache-Control": "no-store"}
    has_ended = record.state in FINISHED
    if not has_ended:
        headers["Retry-After"] = str(RETRY_SECONDS)
    text = await asyncio.to_thread(record.text)
    return Response(text, status or (200 if has_ended else 202), headers, "application/json")
