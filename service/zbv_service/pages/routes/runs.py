"""``/runs/{run_id}`` and ``/runs/{run_id}/measured``: one run, and its measurements against its plan."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.compute.computations import ROWS_OF_NODE
from zbv_service.documents.parsing import parse_body
from zbv_service.pages.answers import page
from zbv_service.pages.views.measured import measured_view
from zbv_service.pages.views.run import run_view
from zbv_service.records.lists import PlanListQuery
from zbv_service.records.runs import RUN_ENDED
from zbv_service.runs.measurements import Chosen, Measured, NothingMeasured, TraceSource
from zbv_service.runs.requests import PlanChange
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 1024
EVENTS = 200
"""The newest events on a page."""
_MAX_INDEX = 2**31 - 1

Index = Annotated[int | None, Query(ge=0, le=_MAX_INDEX)]
LAUNCH = needs("launch")

router = APIRouter(include_in_schema=False)


@router.get("/runs/{run_id}", dependencies=[READ])
async def get_run_page(request: Request, run_id: str, ranks: Index = None) -> Response:
    """The page of a run, with some of its ranks, from ``ranks`` on."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        run = await found.runs.get(run_id)
        index = await found.parts.index(run_id)
        lines = await found.steps.newest(run_id, index)
    events = await found.runs.newest_events(run_id, EVENTS)
    plan = None
    if run.plan_id is not None:
        plans = (await found.plans.page(PlanListQuery(q=run.plan_id, limit=1))).items
        plan = plans[0] if plans else None
    view = await found.computations.write(run_view, run, plan, index, lines, ranks)
    return await page(request, "run.html.j2", view=view, run=run, events=events)


@router.post("/runs/{run_id}/cancel", dependencies=[LAUNCH])
async def post_cancel(request: Request, run_id: str) -> Response:
    """Stop a run on all of its nodes."""
    await state_of(request).runs.cancel(run_id)
    return _to_run(request, run_id)


@router.post("/runs/{run_id}/plan", dependencies=[LAUNCH])
async def post_plan(request: Request, run_id: str) -> Response:
    """Switch a run to another plan."""
    form = parse_qs(await read_form(request, MAX_FORM_BYTES))
    change = parse_body(PlanChange, {"plan_id": form.get("plan_id", [""])[0]})
    await state_of(request).runs.change_plan(run_id, change.plan_id)
    return _to_run(request, run_id)


@router.get("/runs/{run_id}/measured", dependencies=[READ])
async def get_measured_page(
    request: Request,
    run_id: str,
    generation: Index = None,
    replica: Annotated[int, Query(ge=0, le=_MAX_INDEX)] = 0,
    step: Annotated[str, Query(pattern=r"^[0-9]{0,10}$")] = "",
) -> Response:
    """A measured step compared with its plan. A form without a choice sends an empty step."""
    found = state_of(request)
    async with found.computations.listing(ROWS_OF_NODE * (await found.runs.brief(run_id)).nodes):
        run = await found.runs.get(run_id)
    chosen = Chosen(generation, replica, int(step) if step else None)
    measured = await found.measurements.of(run, chosen, partial(_shown, root_of(request)))
    if isinstance(measured, NothingMeasured):
        is_early = measured.reason == "early" and run.state not in RUN_ENDED
        values: dict[str, Any] = {"nothing": measured, "is_early": is_early}
    else:
        values = measured
    return await page(request, "measured.html.j2", run_id=run.id, **values)


def _shown(root: str, found: Measured) -> dict[str, Any]:
    """What the page shows of a measured step; runs in another process."""
    source = TraceSource(**{each.name: getattr(found, each.name) for each in fields(TraceSource)})
    return {
        "found": source,
        "plan_id": found.plan.plan_id,
        "step": found.step.step,
        "is_typical": found.is_typical,
        "view": measured_view(found, root),
    }


def _to_run(request: Request, run_id: str) -> Response:
    return RedirectResponse(f"{root_of(request)}/runs/{quote(run_id)}", 303)
