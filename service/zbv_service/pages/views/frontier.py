"""The page of a plan's frontier of memory and time: a chart without scripts and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.plans.certificate import gap_of
from zbv_solver.plans.plan import Plan
from zbv_solver.search.options import EFFORTS

from zbv_service.frontier.points import CutSummary, Frontier, Point
from zbv_service.pages.shell import Shell, render
from zbv_service.pages.views.frontier_axis import Axis
from zbv_service.pages.views.frontier_picture import Picture, picture_of, state_of
from zbv_service.pages.views.words import counted, placement_name, shape_of


@dataclass(frozen=True)
class PointRow:
    """A row of the table.

    Attributes
    ----------
    at
        The limit in the unit of the chart.
    limit
        The limit of every rank; empty if ``at`` already is.
    cut
        How the best plan divides its layers; empty if all plans have the same cut.
    """

    at: str
    limit: str
    value: str
    bound: str
    gap: str
    is_proved: bool
    plan_id: str | None
    plan_name: str
    needs: str
    cut: str
    is_own: bool
    state: str
    says: str
    search_id: str | None


@dataclass(frozen=True)
class FrontierView:
    """The content of the page.

    Attributes
    ----------
    picture
        None if the problem has no memory costs.
    cuts_anew
        Whether every limit has its own cut.
    has_fixed_cut
        Whether the problem fixed the cut of the layers, so that all limits share it.
    """

    plan_id: str
    title: str
    objective: str
    unit: str
    picture: Picture | None
    rows: tuple[PointRow, ...]
    baselines: tuple[tuple[str, str, str], ...]
    missing: int
    open: int
    improvable: int
    has_bounds: bool
    cuts_anew: bool
    has_fixed_cut: bool
    efforts: tuple[str, ...]
    refused: int
    known: int


def frontier_page(view: FrontierView, shell: Shell) -> str:
    """The page of a frontier."""
    return render("frontier.html.j2", shell, view=view)


def frontier_view(
    plan: Plan, found: Frontier | None, *, most_effort: str, refused: int = 0, known: int = 0, root: str
) -> FrontierView:
    """The known points of a frontier, ready for the template.

    Parameters
    ----------
    found
        None if the problem has no memory costs.
    most_effort
        The highest effort that the service accepts.
    refused
        Points of the last request that must wait.
    known
        Points of the last request that had already been searched with that effort.
    """
    problem, units = plan.problem, plan.problem.units
    points = () if found is None else found.points
    return FrontierView(
        plan_id=plan.plan_id,
        title=shape_of(problem),
        objective=problem.objective,
        unit=quantities.time_unit(units),
        picture=None if found is None else picture_of(found, root),
        rows=() if found is None else tuple(_rows(found, plan)),
        baselines=() if found is None else tuple(_baselines(found)),
        missing=0 if found is None else len(found.missing),
        open=0 if found is None else len(found.open),
        improvable=sum(not point.is_proved and not point.is_open for point in points),
        has_bounds=all(point.bound is not None for point in points),
        cuts_anew=plan.cut is not None,
        has_fixed_cut=problem.model is not None and plan.cut is None,
        efforts=EFFORTS[: EFFORTS.index(most_effort) + 1],
        refused=refused,
        known=known,
    )


def _rows(found: Frontier, plan: Plan) -> Iterator[PointRow]:
    axis = Axis.of(found)
    return (_row(point, plan, axis, found.cuts) for point in found.points)


def _baselines(found: Frontier) -> Iterator[tuple[str, str, str]]:
    axis = Axis.of(found)
    return ((each.name, axis.said(each.needs), quantities.figure(each.value)) for each in found.baselines)


def _row(point: Point, plan: Plan, axis: Axis, cuts: Mapping[str, CutSummary] | None) -> PointRow:
    best, bound = point.best, point.bound
    state, says = state_of(point)
    return PointRow(
        at=axis.said(point.at),
        limit="" if cuts is not None else quantities.memory(point.limit, plan.problem.units),
        value="–" if best is None else quantities.figure(best.value),
        bound="–" if bound is None else quantities.figure(bound),
        gap="–" if best is None or bound is None else quantities.percent(gap_of(best.value, bound)),
        is_proved=point.is_proved,
        plan_id=None if best is None else best.name,
        plan_name="" if best is None else best.name[:12],
        needs="" if best is None else axis.said(best.needs),
        cut="" if best is None or cuts is None else _cut(cuts[best.name]),
        is_own=best is not None and best.name == plan.plan_id,
        state=state,
        says=says,
        search_id=None if point.search is None else point.search.id,
    )


def _cut(cut: CutSummary) -> str:
    """The placement of a plan and its recomputed stages."""
    recomputed = f"{cut.recomputed} of {counted(cut.stages, 'stage')}" if cut.recomputed else "nothing"
    return f"{placement_name(cut.placement, cut.chunks)}, {recomputed} recomputed"
