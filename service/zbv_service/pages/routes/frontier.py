"""``/plans/{plan_id}/frontier``: time against memory, and searching the missing points."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.pages.answers import page
from zbv_service.pages.views.frontier import frontier_view
from zbv_service.security.quotas import STORES
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 1024
_MOST_POINTS = 1000

Points = Annotated[int, Query(ge=0, le=_MOST_POINTS)]

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}/frontier", dependencies=[READ])
async def get_frontier_page(
    request: Request, plan_id: str, refused: Points = 0, known: Points = 0
) -> Response:
    """The frontier of a plan's model. The counts are those of the last request for missing points."""
    found = state_of(request)
    plan = await found.frontiers.plan(plan_id)
    frontier = await found.frontiers.of(plan_id) if plan.fault is None else None
    most = found.settings.max_effort
    make = partial(frontier_view, plan, frontier, most_effort=most, root=root_of(request))
    view = await found.computations.write(make)
    return await page(request, "frontier.html.j2", view=view, refused=refused, known=known)


@router.post("/plans/{plan_id}/frontier", dependencies=[needs("search"), STORES["searches"]])
async def post_frontier(request: Request, plan_id: str) -> Response:
    """Search the missing points, as many as the caller may have open; the others wait."""
    form = parse_qs(await read_form(request, MAX_FORM_BYTES))
    found = state_of(request)
    asked = await found.frontiers.search_missing(
        plan_id,
        form.get("effort", ["standard"])[0],
        caller_of(request),
        most_searches(request),
        again="again" in form,
    )
    query = ""
    if asked.refused:
        query = f"?refused={min(asked.refused, _MOST_POINTS)}"
    elif asked.known and not asked.searched:
        query = f"?known={min(asked.known, _MOST_POINTS)}"
    return RedirectResponse(f"{root_of(request)}/plans/{quote(plan_id)}/frontier{query}", 303)
