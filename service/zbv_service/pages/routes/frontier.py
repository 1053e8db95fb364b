"""``/plans/{plan_id}/frontier``: time against memory, and having missing points searched."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import Plan

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.errors import INVALID_BODY, ProblemError
from zbv_service.frontier.points import Frontier
from zbv_service.pages.answers import page, problem_answer, shell_of
from zbv_service.pages.views.frontier import frontier_page, frontier_view
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 1024
_MOST_POINTS = 1000

Points = Annotated[int, Query(ge=0, le=_MOST_POINTS)]

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}/frontier", dependencies=[READ])
async def get_frontier_page(
    request: Request, plan_id: str, refused: Points = 0, known: Points = 0
) -> Response:
    """The frontier of a plan's model."""
    found = state_of(request)
    try:
        plan = await found.plans.plan(plan_id)
        frontier = await _frontier(request, plan)
    except ProblemError as error:
        return problem_answer(error, request)
    shell, most = shell_of(request), found.settings.max_effort
    make = partial(
        frontier_view, found=frontier, most_effort=most, refused=refused, known=known, root=shell.root
    )
    view = await found.computations.run(make, plan)
    return page(frontier_page(view, shell), headers={"Cache-Control": "no-store"})


@router.post("/plans/{plan_id}/frontier", dependencies=[needs("search")])
async def post_frontier(request: Request, plan_id: str) -> Response:
    """Have the missing points searched; those that are too many for the caller are left for the next time."""
    found = state_of(request)
    try:
        form = parse_qs(await read_form(request, MAX_FORM_BYTES))
        plan = await found.plans.plan(plan_id)
        asked = await found.frontiers.search_missing(
            plan,
            form.get("effort", ["standard"])[0],
            caller_of(request),
            most_searches(request),
            again="again" in form,
        )
    except ProblemError as error:
        return problem_answer(error, request)
    except InvalidInput as error:
        return problem_answer(ProblemError(INVALID_BODY, str(error)), request)
    query = ""
    if asked.refused:
        query = f"?refused={min(asked.refused, _MOST_POINTS)}"
    elif asked.known and not asked.searched:
        query = f"?known={min(asked.known, _MOST_POINTS)}"
    return RedirectResponse(f"{root_of(request)}/plans/{quote(plan_id)}/frontier{query}", 303)


async def _frontier(request: Request, plan: Plan) -> Frontier | None:
    try:
        return await state_of(request).frontiers.of(plan)
    except InvalidInput:
        return None  # it says nothing about memory
