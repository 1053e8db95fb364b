"""The page that compares a plan with others on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.construct.baselines import baseline_names
from zbv_solver.export import quantities, report
from zbv_solver.export.timeline import idle_shares, timeline
from zbv_solver.plans.plan import Baseline, Plan
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Units

from zbv_service.pages.shell import assets
from zbv_service.pages.views.difference import Difference, differences
from zbv_service.pages.views.lanes import Lane, LanesView, lanes_view
from zbv_service.pages.views.words import shape_of
from zbv_service.plans.compared import ComparedPlan
from zbv_service.plans.renderings import plan_of
from zbv_service.records.plans import PlanSummaryDocument


@dataclass(frozen=True)
class Choice:
    """A schedule or a stored plan that the reader may choose."""

    value: str
    label: str
    is_chosen: bool = False


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
    rows: tuple[report.ScheduleRow, ...]
    choices: tuple[Choice, ...]
    alike: tuple[Choice, ...]
    others: tuple[Choice, ...]
    complaints: tuple[tuple[str, str], ...]
    problems: tuple[Other, ...]
    has_cuts: bool
    has_layers: bool


def compare_view(
    plan: Plan,
    compared: Sequence[ComparedPlan],
    offered: tuple[Sequence[PlanSummaryDocument], Sequence[PlanSummaryDocument]],
    root: str,
) -> CompareView:
    """A comparison, ready for the template. Slow: it lays out every action."""
    found = [(each, plan_of(each.packed)) for each in compared if each.packed is not None]
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
        rows=report.schedule_rows(plan, _schedules(plan, found, root)),
        choices=tuple(_choices(plan, compared)),
        alike=tuple(alike),
        others=tuple(others),
        complaints=tuple((_title(each), each.complaint) for each in compared if each.complaint),
        problems=tuple(
            Other(_title(each), f"{root}/plans/{each.name}", differences(plan.problem, other.problem))
            for each, other in found
            if not each.is_baseline and other.problem != plan.problem
        ),
        has_cuts=bool(_other_cuts(plan)),
        has_layers=plan.problem.model is not None,
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


def _schedules(plan: Plan, found: Sequence[tuple[ComparedPlan, Plan]], root: str) -> list[report.Compared]:
    units = plan.problem.units
    own = report.Compared("this plan", plan.metrics, units, _fits(plan, plan), f"{root}/plans/{plan.plan_id}")
    others = [
        report.Compared(
            _title(each),
            other.metrics,
            other.problem.units,
            _fits(plan, other),
            None if each.is_baseline else f"{root}/plans/{each.name}",
        )
        for each, other in found
    ]
    # For other cuts and placements of the same layers only the metrics are stored, not the schedules.
    cuts = [report.Compared(each.name, each, units, each.fits) for each in _other_cuts(plan)]
    return [own, *others, *cuts]


def _other_cuts(plan: Plan) -> list[Baseline]:
    schedules = baseline_names(plan.problem)
    return [each for each in plan.baselines if each.name not in schedules]


def _fits(plan: Plan, other: Plan) -> bool | None:
    """Whether another plan fits this plan's limits; None if the two measure memory in different units.

    A plan with another number of ranks must fit the smallest limit on all of them.
    """
    limits, peaks = plan.problem.memory.limit, other.metrics.peak_memory
    if limits is None:
        return True
    if plan.problem.units.memory != other.problem.units.memory:
        return None
    if len(limits) != len(peaks):
        limits = (min(limits),) * len(peaks)
    return not any(exceeds(peak, limit) for peak, limit in zip(peaks, limits, strict=True))


def _choices(plan: Plan, compared: Sequence[ComparedPlan]) -> list[Choice]:
    chosen = {each.name for each in compared}
    plans = [each for each in compared if not each.is_baseline and not each.complaint]
    return [
        *(Choice(name, name, name in chosen) for name in baseline_names(plan.problem)),
        *(Choice(each.name, _title(each), True) for each in plans),
    ]


def _offer(summary: PlanSummaryDocument) -> Choice:
    value = quantities.time(summary.value, Units(time=summary.time_unit))
    shape = f"{summary.pp_degree} × {summary.microbatches}"
    return Choice(summary.plan_id, f"{summary.plan_id[:12]}: {shape}, {summary.objective} {value}")
