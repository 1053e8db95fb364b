"""The page that compares a plan with others on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.construct.baselines import BASELINES
from zbv_solver.export import quantities, report
from zbv_solver.export.per_rank import idle_shares
from zbv_solver.export.timeline import timeline
from zbv_solver.plans.plan import Baseline, Metrics, Plan
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Objective, Units

from zbv_service.pages.shell import Shell, assets, render
from zbv_service.pages.views.difference import Difference, differences
from zbv_service.pages.views.lanes import Lane, LanesView, lanes_view
from zbv_service.pages.views.words import shape_of
from zbv_service.plans.compared import ComparedPlan
from zbv_service.records.searches import PlanSummary


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule of the table.

    Attributes
    ----------
    fits
        Whether it fits this plan's memory limit; None if the memory units differ.
    share
        Its objective relative to the largest, from 0 to 1.
    """

    name: str
    url: str | None
    span: str
    makespan: str
    bubble: str
    peak: str
    fits: bool | None
    relative: str
    share: float
    is_plan: bool


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule to compare with, as a checkbox."""

    value: str
    label: str
    is_chosen: bool


@dataclass(frozen=True)
class PlanChoice:
    """A stored plan that the reader may add."""

    value: str
    label: str


@dataclass(frozen=True)
class Other:
    """The differences between another plan's problem and this plan's."""

    name: str
    url: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class CompareView:
    """The content of the page; ``lanes`` is None while schedules are computed."""

    plan_id: str
    title: str
    objective: str
    unit: str
    lanes: LanesView | None
    awaited: tuple[str, ...]
    rows: tuple[ScheduleRow, ...]
    choices: tuple[ScheduleChoice, ...]
    alike: tuple[PlanChoice, ...]
    others: tuple[PlanChoice, ...]
    complaints: tuple[tuple[str, str], ...]
    problems: tuple[Other, ...]
    has_cuts: bool


def compare_page(view: CompareView, shell: Shell) -> str:
    """The page of a comparison."""
    return render("compare.html.j2", shell, view=view, modules=report.CHART_MODULES)


def compare_view(
    plan: Plan,
    compared: Sequence[ComparedPlan],
    offered: tuple[Sequence[PlanSummary], Sequence[PlanSummary]],
    root: str,
) -> CompareView:
    """A comparison, ready for the template. Slow: it lays out every action."""
    found = [(each, each.plan) for each in compared if each.plan is not None]
    awaited = tuple(each.name for each in compared if each.is_awaited)
    unit = quantities.time_unit(plan.problem.units)
    alike, others = ([_offer(each) for each in part] for part in offered)
    return CompareView(
        plan_id=plan.plan_id,
        title=shape_of(plan.problem),
        objective=plan.problem.objective,
        unit=unit,
        lanes=None if awaited else lanes_view(_lanes(plan, found, root), unit),
        awaited=awaited,
        rows=tuple(_rows(plan, found, root)),
        choices=tuple(_choices(compared)),
        alike=tuple(alike),
        others=tuple(others),
        complaints=tuple((_title(each), each.complaint) for each in compared if each.complaint),
        problems=tuple(
            Other(_title(each), f"{root}/plans/{each.name}", differences(plan.problem, other.problem))
            for each, other in found
            if not each.is_baseline and other.problem != plan.problem
        ),
        has_cuts=any(each.name not in BASELINES for each in plan.baselines),
    )


def _lanes(plan: Plan, found: Sequence[tuple[ComparedPlan, Plan]], root: str) -> list[Lane]:
    page, version = f"{root}/plans/{plan.plan_id}", assets()
    lanes = [_lane("this plan", plan, f"{page}/actions?v={version}")]
    for each, other in found:
        place = f"{page}/baselines/{each.name}" if each.is_baseline else f"{root}/plans/{each.name}"
        lanes.append(_lane(_title(each), other, f"{place}/actions?v={version}"))
    return lanes


def _lane(name: str, plan: Plan, url: str) -> Lane:
    heading = f"{name}: span {quantities.time(plan.metrics.span, plan.problem.units)}"
    return Lane(heading, timeline(plan), plan.problem, url, idle=tuple(idle_shares(plan)))


def _title(each: ComparedPlan) -> str:
    return each.name if each.is_baseline else f"plan {each.name[:12]}"


def _rows(plan: Plan, found: Sequence[tuple[ComparedPlan, Plan]], root: str) -> list[ScheduleRow]:
    objective = plan.problem.objective
    # For other cuts and placements of the same layers only the metrics are stored, not the schedules.
    cuts = [each for each in plan.baselines if each.name not in BASELINES]
    every: list[Metrics | Baseline] = [plan.metrics, *(other.metrics for _, other in found), *cuts]
    largest = max(_value(each, objective) for each in every) or 1.0

    def row(
        name: str, found: Metrics | Baseline, units: Units, fits: bool | None, url: str | None
    ) -> ScheduleRow:
        value = _value(found, objective)
        return ScheduleRow(
            name=name,
            url=url,
            span=quantities.figure(found.span),
            makespan=quantities.figure(found.makespan),
            bubble=quantities.percent(found.bubble_rate),
            peak=quantities.memory(max(found.peak_memory, default=0.0), units),
            fits=fits,
            relative="" if found is plan.metrics else quantities.relative(value, plan.objective),
            share=value / largest,
            is_plan=found is plan.metrics,
        )

    units = plan.problem.units
    return [
        row("this plan", plan.metrics, units, _fits(plan, plan), f"{root}/plans/{plan.plan_id}"),
        *(
            row(
                _title(each),
                other.metrics,
                other.problem.units,
                _fits(plan, other),
                None if each.is_baseline else f"{root}/plans/{each.name}",
            )
            for each, other in found
        ),
        *(row(each.name, each, units, each.fits, None) for each in cuts),
    ]


def _value(found: Metrics | Baseline, objective: Objective) -> float:
    return found.span if objective == "span" else found.makespan


def _fits(plan: Plan, other: Plan) -> bool | None:
    """Whether another plan fits this plan's limits; with other ranks, the smallest one holds for all.

    None where nobody can say, as the two measure memory in different units.
    """
    limits, peaks = plan.problem.memory.limit, other.metrics.peak_memory
    if limits is None:
        return True
    if plan.problem.units.memory != other.problem.units.memory:
        return None
    if len(limits) != len(peaks):
        limits = (min(limits),) * len(peaks)
    return not any(exceeds(peak, limit) for peak, limit in zip(peaks, limits, strict=True))


def _choices(compared: Sequence[ComparedPlan]) -> list[ScheduleChoice]:
    chosen = {each.name for each in compared}
    known = [ScheduleChoice(name, name, name in chosen) for name in BASELINES]
    return known + [
        ScheduleChoice(each.name, _title(each), True)
        for each in compared
        if not each.is_baseline and not each.complaint
    ]


def _offer(summary: PlanSummary) -> PlanChoice:
    value = quantities.time(summary.value, Units(time=summary.time_unit))
    shape = f"{summary.pp_degree} × {summary.microbatches}"
    return PlanChoice(summary.plan_id, f"{summary.plan_id[:12]}: {shape}, {summary.objective} {value}")
