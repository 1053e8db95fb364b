"""``/v1/searches``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from zbv_service.documents import SearchDocument, SearchList, SearchRequest
from zbv_service.http.bodies import read_json
from zbv_service.http.openapi import body_of
from zbv_service.http.problems import (
    BODY_TOO_LARGE,
    INVALID_BODY,
    INVALID_PARAMETER,
    MALFORMED_JSON,
    NOT_FOUND,
    UNSUPPORTED_MEDIA_TYPE,
    documented,
)
from zbv_service.records import FINISHED, SearchRecord
from zbv_service.routers.rooms import rooms

RETRY_SECONDS = 1

router = APIRouter(prefix="/v1/searches", tags=["searches"])


@router.post(
    "",
    operation_id="submit_search",
    summary="Search a plan for a problem",
    status_code=202,
    response_model=SearchDocument,
    response_description="Accepted, or already accepted before: follow the Location.",
    openapi_extra=body_of(SearchRequest),
    responses={
        200: {"model": SearchDocument, "description": "Answered before: the same problem and options."},
        **documented(MALFORMED_JSON, BODY_TOO_LARGE, UNSUPPORTED_MEDIA_TYPE, INVALID_BODY),
    },
)
async def submit_search(request: Request) -> Response:
    """Equal problems with equal options share one search."""
    found = rooms(request)
    body = await read_json(request, found.settings.max_body_bytes)
    return _answer(await found.searches.submit(body))


@router.get(
    "",
    operation_id="list_searches",
    summary="The newest searches",
    responses=documented(INVALID_PARAMETER),
)
async def list_searches(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> SearchList:
    """The newest first."""
    records = await rooms(request).searches.newest(limit)
    return SearchList(searches=[SearchDocument.of(record) for record in records])


@router.get(
    "/{search_id}",
    operation_id="get_search",
    summary="A search",
    response_model=SearchDocument,
    responses=documented(NOT_FOUND),
)
async def get_search(request: Request, search_id: str) -> Response:
    """Its state, and the best plan known so far."""
    return _body(await rooms(request).searches.get(search_id), 200)


@router.post(
    "/{search_id}/cancel",
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
    return _answer(await rooms(request).searches.cancel(search_id))


def _answer(record: SearchRecord) -> Response:
    return _body(record, 200 if record.state in FINISHED else 202)


def _body(record: SearchRecord, status: int) -> Response:
    headers = {"Location": f"/v1/searches/{record.id}", "Cache-Control": "no-store"}
    if record.state not in FINISHED:
        headers["Retry-After"] = str(RETRY_SECONDS)
    return Response(SearchDocument.of(record).json_bytes(), status, headers, "application/json")
