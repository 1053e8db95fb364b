"""``/searches/{search_id}``: one search."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.http.problems import ProblemError
from zbv_service.pages.search import search_page
from zbv_service.records import FINISHED
from zbv_service.routers.answers import page, problem_answer, shell_of
from zbv_service.routers.pages.rows import search_row
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """One search."""
    try:
        record = await rooms(request).searches.get(search_id)
    except ProblemError as error:
        return problem_answer(error, request)
    text = search_page(
        search_row(record),
        shell_of(request),
        is_open=record.state not in FINISHED,
        lower_bound=record.lower_bound,
        method=record.method,
    )
    return page(text)
