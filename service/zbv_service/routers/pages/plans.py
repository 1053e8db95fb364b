"""``/plans/{plan_id}``: one plan."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from zbv_service.http.problems import ProblemError
from zbv_service.pages.plan import plan_page
from zbv_service.routers.answers import page, problem_answer, shell_of
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import READ

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}", dependencies=[READ])
async def get_plan_page(request: Request, plan_id: str) -> HTMLResponse:
    """One plan."""
    try:
        plan = await rooms(request).plans.plan(plan_id)
    except ProblemError as error:
        return problem_answer(error, request)
    # Drawing takes a second for the largest plans, and the first one also loads Bokeh.
    return page(await asyncio.to_thread(plan_page, plan, shell_of(request)), has_chart=True)
