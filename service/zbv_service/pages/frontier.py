"""``/plans/{plan_id}/frontier``: time against memory, and searching the missing points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from zbv_solver.export import quantities
from zbv_solver.plans.plan import gap_of
from zbv_solver.search.options import EFFORTS, Effort

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import caller_of, most_searches, state_of
from zbv_service.frontier.points import CutSummary, Frontier, Point
from zbv_service.frontier.problems import FrontierPlan
from zbv_service.pages.frontier_picture import Axis, Picture, picture_of, point_state
from zbv_service.pages.shell import page
from zbv_service.pages.words import placement_name, shape_of
from zbv_service.security.quotas import STORES
from zbv_service.security.scheme import READ, needs

MAX_FORM_BYTES = 1024
_MOST_POINTS = 1000

Points = Annotated[int, Query(ge=0, le=_MOST_POINTS)]

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}/frontier", dependencies=[READ])
async def get_frontier_page(
    request: Request, plan_id: str, refused: Points = 0, known: Points = 0
) -> Response:
    """The frontier of a plan's model. The counts are those of the last request for missing points."""
    found = state_of(request)
    plan = await found.frontiers.plan(plan_id)
    frontier = await found.frontiers.of(plan_id) if plan.fault is None else None
    most = found.settings.max_effort
    make = partial(frontier_view, plan, frontier, most_effort=most, root=root_of(request))
    view = await found.computations.write(make)
    return await page(request, "frontier.html.j2", view=view, refused=refused, known=known)


@router.post("/plans/{plan_id}/frontier", dependencies=[needs("search"), STORES["searches"]])
async def post_frontier(request: Request, plan_id: str) -> Response:
    """Search the missing points, as many as the caller may have open; the others wait."""
    form = parse_qs(await read_form(request, MAX_FORM_BYTES))
    found = state_of(request)
    asked = await found.frontiers.search_missing(
        plan_id,
        form.get("effort", ["standard"])[0],
        caller_of(request),
        most_searches(request),
        again="again" in form,
    )
    query = ""
    if asked.refused:
        query = f"?refused={min(asked.refused, _MOST_POINTS)}"
    elif asked.known and not asked.searched:
        query = f"?known={min(asked.known, _MOST_POINTS)}"
    return RedirectResponse(f"{root_of(request)}/plans/{quote(plan_id)}/frontier{query}", 303)


@dataclass(frozen=True)
class PointRow:
    """A row of the table."""

    at: str
    """The limit in the unit of the chart."""
    limit: str
    """The limit of every rank; empty if ``at`` already is."""
    value: str
    bound: str
    gap: str
    is_proved: bool
    plan_id: str | None
    plan_name: str
    needs: str
    cut: str
    """How the best plan divides its layers; empty if all plans have the same cut."""
    is_own: bool
    state: str
    says: str
    search_id: str | None


@dataclass(frozen=True)
class FrontierView:
    """The content of the page."""

    plan_id: str
    title: str
    objective: str
    unit: str
    has_own_cuts: bool
    """Whether every limit has its own cut."""
    has_fixed_cut: bool
    """Whether the problem fixed the cut of the layers, so that all limits share it."""
    efforts: tuple[str, ...]
    """The efforts that the service accepts."""
    picture: Picture | None = None
    """None if the problem has no memory costs."""
    rows: tuple[PointRow, ...] = ()
    baselines: tuple[tuple[str, str, str], ...] = ()
    """Name, memory and objective of the classical schedules."""
    missing: int = 0
    open: int = 0
    improvable: int = 0
    """The number of limits to search, being searched, and searched without a proof."""
    has_bounds: bool = True


def frontier_view(
    plan: FrontierPlan, found: Frontier | None, *, most_effort: Effort, root: str
) -> FrontierView:
    """The known points of a frontier, ready for the template.

    Parameters
    ----------
    found
        None if the problem has no memory costs.
    most_effort
        The highest effort that the service accepts.
    """
    facts = plan.facts
    view = FrontierView(
        plan_id=facts.plan_id,
        title=shape_of(facts),
        objective=facts.objective,
        unit=quantities.time_unit(facts.units),
        has_own_cuts=plan.own_cut is not None,
        has_fixed_cut=facts.cut is not None and plan.own_cut is None,
        efforts=EFFORTS[: EFFORTS.index(most_effort) + 1],
    )
    if found is None:
        return view
    axis = Axis.of(found)
    return replace(
        view,
        picture=picture_of(found, root),
        rows=tuple(_row(point, plan, axis, found.cuts) for point in found.points),
        baselines=tuple(
            (each.name, axis.said(each.needs), quantities.figure(each.value)) for each in found.baselines
        ),
        missing=len(found.missing),
        open=len(found.open),
        improvable=sum(not point.is_proved and not point.is_open for point in found.points),
        has_bounds=all(point.bound is not None for point in found.points),
    )


def _row(point: Point, plan: FrontierPlan, axis: Axis, cuts: Mapping[str, CutSummary] | None) -> PointRow:
    best, bound = point.best, point.bound
    state, says = point_state(point)
    return PointRow(
        at=axis.said(point.at),
        limit="" if cuts is not None else quantities.memory(point.limit, plan.facts.units),
        value="–" if best is None else quantities.figure(best.value),
        bound="–" if bound is None else quantities.figure(bound),
        gap="–" if best is None or bound is None else quantities.percent(gap_of(best.value, bound)),
        is_proved=point.is_proved,
        plan_id=None if best is None else best.name,
        plan_name="" if best is None else best.name[:12],
        needs="" if best is None else axis.said(best.needs),
        cut="" if best is None or cuts is None else _cut(cuts[best.name]),
        is_own=best is not None and best.name == plan.facts.plan_id,
        state=state,
        says=says,
        search_id=None if point.search is None else point.search.id,
    )


def _cut(cut: CutSummary) -> str:
    """The placement of a plan and its recomputed stages."""
    recomputed = (
        f"{cut.recomputed} of {quantities.counted(cut.stages, 'stage')}" if cut.recomputed else "nothing"
    )
    return f"{placement_name(cut.placement, cut.chunks)}, {recomputed} recomputed"
