"""``/searches/{search_id}``: one search."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.http.problems import ProblemError
from zbv_service.pages.search import search_page, search_view
from zbv_service.routers.answers import page, problem_answer, shell_of
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """One search."""
    found = rooms(request).searches
    try:
        record, problem = await found.asked(search_id)
    except ProblemError as error:
        return problem_answer(error, request)
    before = await found.queued_before(record)
    text = search_page(search_view(record, problem, before), shell_of(request))
    return page(text, headers={"Cache-Control": "no-store"})
