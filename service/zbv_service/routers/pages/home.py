"""``/``: the front page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.pages.home import home_page
from zbv_service.routers.answers import page, shell_of
from zbv_service.routers.pages.rows import plan_row, search_row
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import READ

LISTED = 50

router = APIRouter(include_in_schema=False)


@router.get("/", dependencies=[READ])
async def get_home(request: Request) -> HTMLResponse:
    """The newest searches and plans."""
    found = rooms(request)
    searches = [search_row(record) for record in await found.searches.newest(LISTED)]
    plans = [plan_row(summary) for summary in await found.plans.newest(LISTED)]
    return page(home_page(searches, plans, shell_of(request)))
