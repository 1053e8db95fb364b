"""``/searches/{search_id}``: one search."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.api.state import state_of
from zbv_service.errors import ProblemError
from zbv_service.pages.answers import page, problem_answer, shell_of
from zbv_service.pages.views.search import SearchView, search_page, search_view
from zbv_service.records.searches import SearchRecord
from zbv_service.searches.searches import parse_packed
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """One search."""
    found = state_of(request)
    try:
        record, packed = await found.searches.asked(search_id)
        make = partial(_view, record, await found.searches.queued_before(record))
        view = await found.computations.run(make, packed)
    except ProblemError as error:
        return problem_answer(error, request)
    text = search_page(view, shell_of(request))
    return page(text, headers={"Cache-Control": "no-store"})


def _view(record: SearchRecord, before: int | None, packed: bytes) -> SearchView:
    return search_view(record, parse_packed(packed), before)
