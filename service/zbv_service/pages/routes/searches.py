"""``/searches/{search_id}``: one search."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.api.state import state_of
from zbv_service.pages.answers import page
from zbv_service.pages.views.search import SearchView, search_view
from zbv_service.records.searches import SearchDocument
from zbv_service.searches.searches import parse_packed
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """The page of a search."""
    found = state_of(request)
    record, packed = await found.searches.asked(search_id)
    view = await found.computations.run(partial(_view, record), packed)
    return await page(request, "search.html.j2", view=view, row=record)


def _view(record: SearchDocument, packed: bytes) -> SearchView:
    return search_view(record, parse_packed(packed))
