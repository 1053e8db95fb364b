"""``/new``: the form for a new search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from zbv_solver.problem.problem import Problem

from zbv_service.api.state import state_of
from zbv_service.documents.problems import asked_of
from zbv_service.errors import ApiError
from zbv_service.pages.answers import html, shell_of
from zbv_service.pages.views.new_search import (
    Start,
    new_search_page,
    presets,
    start_at,
    start_from,
    start_from_layers,
)
from zbv_service.plans.renderings import plan_of
from zbv_service.records.searches import SearchDocument
from zbv_service.searches.searches import parse_packed
from zbv_service.security.scheme import READ

PLAN_ID = 64
"""Characters of a plan's id; a search's has half as many."""
_SMALLEST = " Its memory limit is the smallest that some plan fits; a little more leaves less idle time."

router = APIRouter(include_in_schema=False)


@router.get("/new", dependencies=[READ])
async def get_new_search_page(request: Request) -> HTMLResponse:
    """The form: empty, with a preset, or with the problem of a search or plan (``from``)."""
    asked = request.query_params
    shell, most = shell_of(request), state_of(request).settings.max_effort
    source, preset = asked.get("from", ""), asked.get("preset", "")
    try:
        if source:
            return html(await _earlier(request, source, at_smallest_limit=asked.get("limit") == "smallest"))
        named = {each.name: each for each in presets()}
        start = start_at(named.get(preset, presets()[0]))
    except ApiError as error:
        start = start_at(presets()[0], f"{error.detail} This is the form as it is without it.")
    return html(new_search_page(start, shell, max_effort=most))


async def _earlier(request: Request, source: str, *, at_smallest_limit: bool) -> bytes:
    """The page with the problem of the search or plan with an id; rendering large ones takes long."""
    found = state_of(request)
    write = partial(new_search_page, shell=shell_of(request), max_effort=found.settings.max_effort)
    if len(source) == PLAN_ID:
        return await found.plans.compute(partial(_of_plan, write, at_smallest_limit), source)
    record, packed = await found.searches.asked(source)
    return await found.computations.run(partial(_of_search, write, at_smallest_limit, record), packed)


def _of_plan(write: Callable[[Start], bytes], at_smallest_limit: bool, packed: bytes) -> bytes:
    plan = plan_of(packed)
    note = f"This is the problem of plan {plan.plan_id[:12]}."
    if plan.cut is not None:
        # For layers, only a search that found no plan knows the smallest limit.
        return write(start_from_layers(asked_of(plan), {}, f"{note} Its layers are cut again."))
    return write(_start_from(plan.problem, {}, note, at_smallest_limit))


def _of_search(
    write: Callable[[Start], bytes], at_smallest_limit: bool, record: SearchDocument, packed: bytes
) -> bytes:
    problem, note = parse_packed(packed), f"This is the problem of search {record.id[:12]}."
    if isinstance(problem, Problem):
        return write(_start_from(problem, record.options.stored(), note, at_smallest_limit))
    needed = (record.error or {}).get("smallest_limit") if at_smallest_limit else None
    return write(
        start_from_layers(problem, record.options.stored(), note + (_SMALLEST if needed else ""), needed)
    )


def _start_from(problem: Problem, options: Mapping[str, Any], note: str, at_smallest_limit: bool) -> Start:
    note += _SMALLEST if at_smallest_limit else ""
    return start_from(problem, options, note, at_smallest_limit=at_smallest_limit)
