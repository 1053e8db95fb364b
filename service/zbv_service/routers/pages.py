"""The pages for people: ``/``, ``/searches/{search_id}``, ``/plans/{plan_id}``, and the files they load."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from zbv_service import pages
from zbv_service.http.problems import ProblemError
from zbv_service.records import FINISHED, PlanSummary, SearchRecord
from zbv_service.routers.answers import page
from zbv_service.routers.rooms import rooms
from zbv_service.security.grants import grant_of
from zbv_service.security.scheme import READ

LISTED = 50

router = APIRouter(include_in_schema=False)


def mount_static(app: FastAPI) -> None:
    """Serve the style sheets and scripts of the pages."""
    app.mount("/static/bokeh", StaticFiles(directory=pages.BOKEH_STATIC), name="bokeh")
    app.mount("/static", StaticFiles(directory=pages.STATIC), name="static")


@router.get("/", dependencies=[READ])
async def get_index(request: Request) -> HTMLResponse:
    """The newest searches and plans."""
    found = rooms(request)
    searches = [_search_row(record) for record in await found.searches.newest(LISTED)]
    plans = [_plan_row(summary) for summary in await found.plans.newest(LISTED)]
    root, base_url, account = _root(request), str(request.base_url), _account(request)
    return page(pages.index_page(searches, plans, root=root, base_url=base_url, account=account))


@router.get("/searches/{search_id}", dependencies=[READ])
async def get_search_page(request: Request, search_id: str) -> HTMLResponse:
    """One search."""
    root = _root(request)
    try:
        record = await rooms(request).searches.get(search_id)
    except ProblemError as error:
        return _problem_page(error, root)
    text = pages.search_page(
        _search_row(record),
        is_open=record.state not in FINISHED,
        lower_bound=record.lower_bound,
        method=record.method,
        root=root,
        account=_account(request),
    )
    return page(text)


@router.get("/plans/{plan_id}", dependencies=[READ])
async def get_plan_page(request: Request, plan_id: str) -> HTMLResponse:
    """One plan."""
    root = _root(request)
    try:
        plan = await rooms(request).plans.plan(plan_id)
    except ProblemError as error:
        return _problem_page(error, root)
    # Drawing takes a second for the largest plans, and the first one also loads Bokeh.
    text = await asyncio.to_thread(pages.plan_page, plan, root=root, account=_account(request))
    return page(text, has_chart=True)


def _problem_page(error: ProblemError, root: str) -> HTMLResponse:
    kind = error.kind
    return page(pages.problem_page(kind.status, kind.title, error.detail, root=root), kind.status)


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def _account(request: Request) -> str | None:
    grant = grant_of(request)
    return grant.name if grant.means == "session" else None


def _search_row(record: SearchRecord) -> pages.SearchRow:
    return pages.SearchRow(
        id=record.id,
        state=record.state,
        pp_degree=record.summary["pp_degree"],
        microbatches=record.summary["microbatches"],
        objective=record.summary["objective"],
        created_at=record.created_at,
        value=record.objective,
        gap=record.gap,
        plan_id=record.plan_id,
        error=None if record.error is None else record.error["detail"],
        time_unit=record.summary.get("time_unit"),
    )


def _plan_row(summary: PlanSummary) -> pages.PlanRow:
    return pages.PlanRow(
        plan_id=summary.plan_id,
        pp_degree=summary.pp_degree,
        microbatches=summary.microbatches,
        objective=summary.objective,
        value=summary.value,
        bubble_rate=summary.bubble_rate,
        gap=summary.gap,
        status=summary.status,
        created_at=summary.created_at,
        method=summary.method,
        time_unit=summary.time_unit,
    )
