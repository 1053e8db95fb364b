"""``/new``: asking for a search."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from zbv_solver.layers.layered_problem import LayeredProblem

from zbv_service.http.problems import ProblemError
from zbv_service.pages.new_search import (
    Start,
    new_search_page,
    presets,
    start_at,
    start_from,
    start_from_layers,
)
from zbv_service.questions import Question, asked_of
from zbv_service.routers.answers import page, shell_of
from zbv_service.routers.rooms import rooms
from zbv_service.security.scheme import READ

PLAN_ID = 64
"""Characters of a plan's id; a search's has half as many."""

router = APIRouter(include_in_schema=False)


@router.get("/new", dependencies=[READ])
async def get_new_search_page(request: Request) -> HTMLResponse:
    """The form: empty, with a preset, or with the problem of a search or plan (``from``)."""
    asked = request.query_params
    try:
        start = await _start(request, asked.get("from", ""), asked.get("preset", ""), asked.get("limit", ""))
    except ProblemError as error:
        start = start_at(presets()[0], f"{error.detail} This is the form as it is without it.")
    shell = shell_of(request)
    text = new_search_page(start, shell, max_effort=rooms(request).settings.max_effort)
    return page(text, headers={"Cache-Control": "no-store"})


async def _start(request: Request, source: str, preset: str, limit: str) -> Start:
    if source:
        return await _earlier(request, source, at_smallest_limit=limit == "smallest")
    named = {each.name: each for each in presets()}
    return start_at(named.get(preset, presets()[0]))


async def _earlier(request: Request, source: str, *, at_smallest_limit: bool) -> Start:
    """The problem of the search or plan with an id."""
    found = rooms(request)
    kind: Literal["plan", "search"] = "plan" if len(source) == PLAN_ID else "search"
    options: dict[str, Any] = {}
    problem: Question
    needed: list[float] | None = None
    if kind == "plan":
        plan = await found.plans.plan(source)
        problem = plan.problem if plan.cut is None else asked_of(plan)
    else:
        record, problem = await found.searches.asked(source)
        options, needed = record.options, (record.error or {}).get("smallest_limit")
    note = f"This is the problem of {kind} {source[:12]}."
    if isinstance(problem, LayeredProblem) and needed is None:
        at_smallest_limit = False  # which only a search that found nothing knows
    if at_smallest_limit:
        note += " Its memory limit is the smallest that some plan fits; a little more leaves less idle time."
    if isinstance(problem, LayeredProblem):
        if kind == "plan":
            note += " Its layers are cut anew."
        return start_from_layers(problem, options, note, needed if at_smallest_limit else None)
    return start_from(problem, options, note, at_smallest_limit=at_smallest_limit)
