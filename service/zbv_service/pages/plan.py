"""``/plans/{plan_id}``: one plan, its actions for the chart's script, and its thumbnail."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from zbv_solver.export import FORMATS, report

from zbv_service.api.routers.plans import derived
from zbv_service.api.state import state_of
from zbv_service.pages.assets import assets
from zbv_service.pages.shell import Shell, html, render, shell_of
from zbv_service.security.access import READ

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}", dependencies=[READ])
async def get_plan_page(request: Request, plan_id: str) -> HTMLResponse:
    """The page of a plan."""
    found = state_of(request)
    view = await found.plans.view(plan_id)
    stored = await found.plans.summary(plan_id)
    name = None if stored is None else stored.name
    return html(await found.computations.write(plan_page, view, shell_of(request), name), headers={})


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


def plan_page(view: report.PlanView, shell: Shell, name: str | None = None) -> bytes:
    """The solver's view of a plan, with its name, and links to the pages and documents of the service."""
    page, document = f"{shell.root}/plans/{view.plan_id}", f"{shell.root}/v1/plans/{view.plan_id}"
    links = [
        report.PageLink(
            "Change and search again",
            f"{shell.root}/new?from={view.plan_id}",
            "A new search that begins with this plan's problem",
        ),
        report.PageLink("Compare", f"{page}/compare", "With other schedules on one time axis"),
        report.PageLink("Memory and time", f"{page}/frontier", "The best span at every memory limit"),
        report.PageLink(
            "Trace for Perfetto",
            f"{document}/export/chrome-trace",
            "Downloads the trace, a file that ui.perfetto.dev and chrome://tracing open",
        ),
    ]
    if shell.may_launch:
        links.append(report.PageLink("Run this plan", "#run", "The command that trains with it"))
    linked = replace(
        view,
        title=f"{name}: {view.title}" if name else view.title,
        links=tuple(links if shell.may_search else links[1:]),
        exports=tuple(
            report.PageLink(name, f"{document}/export/{name}", entry.description)
            for name, entry in FORMATS.items()
        ),
        frontier_url=f"{page}/frontier",
        json_url=document,
        # The version is part of the address, because browsers cache the answer without asking again.
        actions_url=f"{page}/actions?v={assets()}",
    )
    return render("plan.html.j2", shell, view=linked)
