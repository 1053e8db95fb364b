"""``/plans/{plan_id}``: one plan, and what the script of its page draws."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from zbv_service.api.state import derived, state_of
from zbv_service.errors import ProblemError
from zbv_service.pages.answers import page, problem_answer, shell_of
from zbv_service.pages.views.plan import plan_page
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}", dependencies=[READ])
async def get_plan_page(request: Request, plan_id: str) -> HTMLResponse:
    """One plan."""
    found = state_of(request)
    try:
        view = await found.plans.view(plan_id)
        text = await found.computations.write(plan_page, view, shell_of(request))
    except ProblemError as error:
        return problem_answer(error, request)
    return page(text)


@router.get("/plans/{plan_id}/actions", dependencies=[READ])
async def get_plan_actions(request: Request, plan_id: str) -> Response:
    """A plan's actions for the script of its chart: see :mod:`zbv_solver.export.timeline_data`."""
    content = await state_of(request).plans.actions(plan_id)
    headers, known = derived(request, f"{plan_id}-actions")
    return known or Response(content, headers=headers, media_type="application/octet-stream")
