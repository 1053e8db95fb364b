"""``/runs/{run_id}`` and ``/runs/{run_id}/measured``: one run, and what it measured against its plan."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from zbv_solver.errors import InvalidInput

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.documents.parsing import parse_body
from zbv_service.errors import INVALID_BODY, ProblemError
from zbv_service.pages.answers import page, problem_answer, shell_of
from zbv_service.pages.views.measured import measured_page, measured_view, nothing_view
from zbv_service.pages.views.run import run_page, run_view
from zbv_service.records.runs import RUN_ENDED
from zbv_service.records.searches import PlanFilter, PlanSummary
from zbv_service.runs.documents import PlanChange
from zbv_service.runs.measurements import Chosen, NothingMeasured
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 1024
EVENTS = 200
"""Of the newest that a page shows."""
_MAX_INDEX = 2**31 - 1
NO_STORE = {"Cache-Control": "no-store"}

Index = Annotated[int | None, Query(ge=0, le=_MAX_INDEX)]
LAUNCH = needs("launch")

router = APIRouter(include_in_schema=False)


@router.get("/runs/{run_id}", dependencies=[READ])
async def get_run_page(request: Request, run_id: str) -> Response:
    """One run."""
    found = state_of(request)
    try:
        run = await found.runs.get(run_id)
        events = await found.runs.newest_events(run_id, EVENTS)
        index = await found.parts.index(run_id)
        lines = await found.steps.newest(run_id, index)
        plan = None if run.plan_id is None else await _summary(request, run.plan_id)
    except ProblemError as error:
        return problem_answer(error, request)
    shell = shell_of(request)
    view = run_view(run, plan, events, index, lines, shell)
    return page(run_page(view, shell), headers=NO_STORE)


@router.post("/runs/{run_id}/cancel", dependencies=[LAUNCH])
async def post_cancel(request: Request, run_id: str) -> Response:
    """Stop a run on all of its nodes."""
    try:
        await state_of(request).runs.cancel(run_id)
    except ProblemError as error:
        return problem_answer(error, request)
    return _to_run(request, run_id)


@router.post("/runs/{run_id}/plan", dependencies=[LAUNCH])
async def post_plan(request: Request, run_id: str) -> Response:
    """Have a run change over to another plan."""
    try:
        form = parse_qs(await read_form(request, MAX_FORM_BYTES))
        change = parse_body(PlanChange, {"plan_id": form.get("plan_id", [""])[0]})
        await state_of(request).runs.change_plan(run_id, change.plan_id)
    except ProblemError as error:
        return problem_answer(error, request)
    except InvalidInput as error:
        return problem_answer(ProblemError(INVALID_BODY, str(error)), request)
    return _to_run(request, run_id)


@router.get("/runs/{run_id}/measured", dependencies=[READ])
async def get_measured_page(
    request: Request,
    run_id: str,
    generation: Index = None,
    replica: Annotated[int, Query(ge=0, le=_MAX_INDEX)] = 0,
    step: Annotated[str, Query(pattern=r"^[0-9]{0,10}$")] = "",
) -> Response:
    """A measured step over its plan; a form without a choice sends an empty step."""
    found = state_of(request)
    try:
        run = await found.runs.get(run_id)
        chosen = Chosen(generation, replica, int(step) if step else None)
        measured = await found.measurements.of(run, chosen)
    except ProblemError as error:
        return problem_answer(error, request)
    shell, is_open = shell_of(request), run.state not in RUN_ENDED
    if isinstance(measured, NothingMeasured):
        view = nothing_view(run.id, measured, is_open=is_open)
        return page(measured_page(view, shell), headers=NO_STORE)
    make = partial(measured_view, run.id, root=shell.root, is_open=is_open)
    view = await found.computations.run(make, measured)
    return page(measured_page(view, shell), headers=NO_STORE)


async def _summary(request: Request, plan_id: str) -> PlanSummary | None:
    found = await state_of(request).plans.page(PlanFilter(text=plan_id), 1, None)
    return found.items[0] if found.items else None


def _to_run(request: Request, run_id: str) -> Response:
    return RedirectResponse(f"{root_of(request)}/runs/{quote(run_id)}", 303)
