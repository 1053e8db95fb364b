"""``/v1/searches``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from zbv_service.api.bodies import read_text
from zbv_service.api.cursors import neighbours, position_of
from zbv_service.api.error_handlers import documented
from zbv_service.api.idempotency import KEY_PARAMETER
from zbv_service.api.listing import SearchListQuery, page_at
from zbv_service.api.negotiation import VARY, wants_page
from zbv_service.api.openapi import body_of
from zbv_service.api.state import SEE_PAGE, caller_of, most_searches, request_key, state_of
from zbv_service.errors import (
    BODY_TOO_LARGE,
    IDEMPOTENCY_KEY_IN_USE,
    IDEMPOTENCY_KEY_REUSED,
    INVALID_BODY,
    INVALID_IDEMPOTENCY_KEY,
    INVALID_PARAMETER,
    MALFORMED_JSON,
    NOT_FOUND,
    SEARCH_DISCARDED,
    SEARCH_IN_USE,
    UNSUPPORTED_MEDIA_TYPE,
)
from zbv_service.records.searches import FINISHED, SearchRecord
from zbv_service.searches.documents import SearchDocument, SearchList, SearchRequest
from zbv_service.security.scheme import READ, needs

RETRY_SECONDS = 1
SEARCH = needs("search")

router = APIRouter(prefix="/v1/searches", tags=["searches"])


@router.post(
    "",
    dependencies=[SEARCH],
    operation_id="submit_search",
    summary="Search a plan for a problem",
    status_code=202,
    response_model=SearchDocument,
    response_description="Accepted, or already accepted before: follow the Location.",
    openapi_extra={**body_of(SearchRequest), "parameters": [KEY_PARAMETER]},
    responses={
        200: {"model": SearchDocument, "description": "Answered before: the same problem and options."},
        **documented(
            MALFORMED_JSON,
            INVALID_IDEMPOTENCY_KEY,
            IDEMPOTENCY_KEY_IN_USE,
            SEARCH_DISCARDED,
            BODY_TOO_LARGE,
            UNSUPPORTED_MEDIA_TYPE,
            INVALID_BODY,
            IDEMPOTENCY_KEY_REUSED,
        ),
    },
)
async def submit_search(request: Request) -> Response:
    """Equal problems with equal options share one search, until it is cancelled, fails or is discarded."""
    found = state_of(request)
    key = request_key(request)
    async with read_text(request, found.settings.max_body_bytes) as body:
        record = await found.searches.submit(
            body, key=key, caller=caller_of(request), most=most_searches(request)
        )
    return _answer(record)


@router.get(
    "",
    dependencies=[READ],
    operation_id="list_searches",
    summary="Searches, the newest first",
    response_model=SearchList,
    responses={**SEE_PAGE, **documented(INVALID_PARAMETER)},
)
async def list_searches(request: Request, query: Annotated[SearchListQuery, Query()]) -> Response:
    """By pages: ``next`` leads to older ones, ``previous`` to newer ones. New ones shift nothing."""
    if wants_page(request):
        return page_at(request, "/searches")
    found = state_of(request)
    async with found.computations.listing(query.limit):
        page = await found.searches.page(query.filter, query.limit, position_of(query.cursor))
    around = neighbours(request, page)

    def write() -> bytes:
        searches = [SearchDocument.of(record) for record in page.items]
        return SearchList(searches=searches, next=around.next, previous=around.previous).json_bytes()

    text = await found.computations.write(write)
    headers = {**VARY, **around.fields, "Cache-Control": "no-store"}
    return Response(text, headers=headers, media_type="application/json")


@router.get(
    "/{search_id}",
    dependencies=[READ],
    operation_id="get_search",
    summary="A search",
    response_model=SearchDocument,
    responses={**SEE_PAGE, **documented(NOT_FOUND)},
)
async def get_search(request: Request, search_id: str) -> Response:
    """Its state, and the best plan known so far."""
    if wants_page(request):
        return page_at(request, f"/searches/{search_id}")
    found = state_of(request).searches
    record = await found.get(search_id)
    return _body(record, 200, await found.queued_before(record))


@router.get(
    "/{search_id}/problem",
    dependencies=[READ],
    operation_id="get_search_problem",
    summary="The problem of a search",
    response_description="The normalised problem document, for a report or for another search.",
    responses={
        200: {"content": {"application/json": {"schema": {"type": "object"}}}},
        **documented(NOT_FOUND),
    },
)
async def get_search_problem(request: Request, search_id: str) -> Response:
    """It is kept as long as its search."""
    text = await state_of(request).searches.problem_text(search_id)
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.post(
    "/{search_id}/cancel",
    dependencies=[SEARCH],
    operation_id="cancel_search",
    summary="Stop a search",
    status_code=202,
    response_model=SearchDocument,
    response_description="It will stop soon, and keep the best plan it found.",
    responses={
        200: {"model": SearchDocument, "description": "It has ended."},
        **documented(NOT_FOUND),
    },
)
async def cancel_search(request: Request, search_id: str) -> Response:
    """A search that has ended stays as it is."""
    return _answer(await state_of(request).searches.cancel(search_id))


@router.delete(
    "/{search_id}",
    dependencies=[SEARCH],
    operation_id="discard_search",
    summary="Stop a search and forget it",
    status_code=204,
    response_description="It is gone, with its events. Whoever shared it finds nothing any more.",
    responses=documented(NOT_FOUND, SEARCH_IN_USE),
)
async def discard_search(request: Request, search_id: str) -> Response:
    """A plan that it found stays: plans never change, and others may use it."""
    await state_of(request).searches.discard(search_id)
    return Response(status_code=204)


def _answer(record: SearchRecord) -> Response:
    return _body(record, 200 if record.state in FINISHED else 202)


def _body(record: SearchRecord, status: int, queued_before: int | None = None) -> Response:
    headers = {**VARY, "Location": f"/v1/searches/{record.id}", "Cache-Control": "no-store"}
    if record.state not in FINISHED:
        headers["Retry-After"] = str(RETRY_SECONDS)
    document = SearchDocument.of(record, queued_before)
    return Response(document.json_bytes(), status, headers, "application/json")
