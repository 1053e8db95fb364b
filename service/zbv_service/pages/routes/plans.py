"""``/plans/{plan_id}``: one plan, its actions for the chart's script, and its thumbnail."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from zbv_service.api.caching import derived
from zbv_service.api.state import state_of
from zbv_service.pages.answers import html, shell_of
from zbv_service.pages.views.plan import plan_page
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}", dependencies=[READ])
async def get_plan_page(request: Request, plan_id: str) -> HTMLResponse:
    """The page of a plan."""
    found = state_of(request)
    view = await found.plans.view(plan_id)
    return html(await found.computations.write(plan_page, view, shell_of(request)), headers={})


@router.get("/plans/{plan_id}/actions", dependencies=[READ])
async def get_plan_actions(request: Request, plan_id: str) -> Response:
    """A plan's actions for the script of its chart: see :mod:`zbv_solver.export.timeline`."""
    content = await state_of(request).plans.actions(plan_id)
    headers, known = derived(request, f"{plan_id}-actions")
    return known or Response(content, headers=headers, media_type="application/octet-stream")


@router.get("/plans/{plan_id}/thumbnail.png", dependencies=[READ])
async def get_thumbnail(request: Request, plan_id: str) -> Response:
    """A plan's schedule as a small picture."""
    picture = await state_of(request).plans.thumbnail(plan_id)
    headers, known = derived(request, f"{plan_id}-thumbnail")
    return known or Response(picture, headers=headers, media_type="image/png")
