"""``/plans/{plan_id}/compare``: a plan, classical schedules and other plans on one time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from zbv_solver.construct.baselines import baseline_names
from zbv_solver.export import quantities, report
from zbv_solver.export.report.figures import cost_values
from zbv_solver.export.timeline import idle_shares, timeline
from zbv_solver.plans.plan import Baseline, Plan
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.numeric import ROUNDING, exceeds
from zbv_solver.problem.problem import Problem, Units

from zbv_service.api.negotiation import root_of
from zbv_service.api.routers.plans import derived
from zbv_service.api.state import state_of
from zbv_service.errors import NOT_FOUND, ApiError
from zbv_service.pages.assets import assets
from zbv_service.pages.lanes import Lane, lanes_values
from zbv_service.pages.shell import page
from zbv_service.pages.words import shape_of
from zbv_service.plans.compared import USUAL, ComparedPlan
from zbv_service.plans.renderings import actions_of, plan_of
from zbv_service.records.plans import PlanSummaryDocument
from zbv_service.security.access import READ

MOST_NAMES = 32
LONGEST_NAME = 100

router = APIRouter(include_in_schema=False)


@router.get("/plans/{plan_id}/compare", dependencies=[READ])
async def get_compare_page(
    request: Request,
    plan_id: str,
    chosen: Annotated[list[str] | None, Query(alias="with", max_length=MOST_NAMES)] = None,
) -> Response:
    """The comparison. The form always sends an empty name, so that choosing nothing differs from no form."""
    found = state_of(request)
    names = USUAL if chosen is None else [name.strip()[:LONGEST_NAME] for name in chosen if name.strip()]
    plan = await found.plans.facts(plan_id)
    compared = await found.compared.of(plan, names)
    offered = await found.compared.offered(plan)
    make = partial(_values, compared, offered, root_of(request))
    return await page(request, "compare.html.j2", **await found.plans.compute(make, plan_id))


@router.get("/plans/{plan_id}/baselines/{name}/actions", dependencies=[READ])
async def get_baseline_actions(request: Request, plan_id: str, name: str) -> Response:
    """A classical schedule's packed actions: see :mod:`zbv_solver.export.timeline`."""
    found = state_of(request)
    baseline = await found.compared.baseline(await found.plans.facts(plan_id), name)
    if baseline is None:
        raise ApiError(NOT_FOUND, f"found no classical schedule {name[:LONGEST_NAME]!r}.")
    headers, known = derived(request, f"{plan_id}-{name}-actions")
    return known or Response(
        await found.computations.run(actions_of, baseline),
        headers=headers,
        media_type="application/octet-stream",
    )


def _values(
    compared: Sequence[ComparedPlan],
    offered: tuple[Sequence[PlanSummaryDocument], Sequence[PlanSummaryDocument]],
    root: str,
    packed: bytes,
) -> dict[str, Any]:
    return compare_values(plan_of(packed), compared, offered, root)


def compare_values(
    plan: Plan,
    compared: Sequence[ComparedPlan],
    offered: tuple[Sequence[PlanSummaryDocument], Sequence[PlanSummaryDocument]],
    root: str,
) -> dict[str, Any]:
    """What the template shows of a comparison. Slow: it lays out every action.

    ``lanes`` is None while schedules are computed.
    """
    found = [(entry, plan_of(entry.packed)) for entry in compared if entry.packed is not None]
    awaited = [entry.name for entry in compared if entry.is_awaited]
    unit = quantities.time_unit(plan.problem.units)
    return {
        "plan_id": plan.plan_id,
        "title": shape_of(plan.problem),
        "objective": plan.problem.objective,
        "unit": unit,
        "lanes": None if awaited else lanes_values(_lanes(plan, found, root), unit),
        "awaited": awaited,
        "schedules": report.schedule_rows(plan, _schedules(plan, found, root)),
        "choices": _choices(plan, compared),
        "alike": [*map(_offer, offered[0])],
        "others": [*map(_offer, offered[1])],
        "complaints": [(_title(entry), entry.complaint) for entry in compared if entry.complaint],
        "problems": [
            (_title(entry), f"{root}/plans/{entry.name}", differences(plan.problem, other.problem))
            for entry, other in found
            if not entry.is_baseline and other.problem != plan.problem
        ],
        "has_cuts": bool(_other_cuts(plan)),
        "has_layers": plan.problem.model is not None,
    }


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


def _choices(plan: Plan, compared: Sequence[ComparedPlan]) -> list[tuple[str, str, bool]]:
    """Value and label of each schedule or plan that the reader may choose, and whether it is chosen."""
    chosen = {entry.name for entry in compared}
    plans = [entry for entry in compared if not entry.is_baseline and not entry.complaint]
    return [
        *((name, name, name in chosen) for name in baseline_names(plan.problem)),
        *((entry.name, _title(entry), True) for entry in plans),
    ]


def _offer(summary: PlanSummaryDocument) -> tuple[str, str]:
    """Value and label of a stored plan that the reader may add."""
    value = quantities.time(summary.value, Units(time=summary.time_unit))
    shape = f"{summary.pp_degree} × {summary.microbatches}"
    return summary.plan_id, f"{summary.plan_id[:12]}: {shape}, {summary.objective} {value}"


_TERMS = {
    "forward": "forward F",
    "backward_input": "backward, input I",
    "backward_weight": "backward, weight W",
    "backward": "full backward B",
    "p2p": "transfer",
    "memory forward": "memory of F",
    "memory backward_input": "memory of I",
    "memory backward_weight": "memory of W",
}
"""Costs and deltas in words, by their names in :func:`cost_values`."""


def differences(here: Problem, there: Problem) -> list[tuple[str, str, str]]:
    """Every quantity that differs, with both values; those of stages, microbatches and ranks as a range."""
    return [(name, mine, theirs) for name, mine, theirs in _quantities(here, there) if mine != theirs]


def _quantities(here: Problem, there: Problem) -> Iterator[tuple[str, str, str]]:
    yield "ranks", str(here.pp_degree), str(there.pp_degree)
    yield "microbatches", str(here.microbatches), str(there.microbatches)
    yield "placement", _placement(here), _placement(there)
    yield "objective", here.objective, there.objective
    yield "time unit", here.units.time or "none", there.units.time or "none"
    yield "memory unit", here.units.memory or "none", there.units.memory or "none"
    one, other = cost_values(here), cost_values(there)
    for name, mine, theirs in (
        *((term, one[name], other[name]) for name, term in _TERMS.items()),
        ("static memory", here.memory.static, there.memory.static),
        ("memory limit", here.memory.limit, there.memory.limit),
    ):
        if not _same(mine, theirs):
            yield name, *_told_apart(_spread(mine), _spread(theirs), mine, theirs)
    if (here.features, there.features) != ((), ()):
        yield "features", _features(here), _features(there)
    if here.model != there.model:
        yield "layers", *_layers_apart(here.model, there.model)


def _features(problem: Problem) -> str:
    return ", ".join(f"{each.name} {_spread(each.value)}" for each in problem.features) or "none"


def _layers_apart(mine: CutModel | None, theirs: CutModel | None) -> tuple[str, str]:
    one, other = _layers(mine), _layers(theirs)
    return (one, other) if one != other else (one, f"{other}, different layers or stages")


def _layers(model: CutModel | None) -> str:
    return "none" if model is None else f"{model.model.n_layers} in {model.cut.n_stages} stages"


def _placement(problem: Problem) -> str:
    return f"{problem.placement.kind}, {problem.placement.chunks} per rank"


def _same(mine: Sequence[float] | None, theirs: Sequence[float] | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if len(mine) != len(theirs):
        # With other numbers of stages or ranks, values are equal if all of them are one and the same number.
        return len(set(mine) | set(theirs)) == 1 or not (mine or theirs)
    return all(map(_near, mine, theirs))


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= ROUNDING * max(abs(a), abs(b))


def _spread(values: Sequence[float] | None) -> str:
    return quantities.spread(values, lambda value: f"{value:.6g}")


def _told_apart(
    mine: str, theirs: str, here: Sequence[float] | None, there: Sequence[float] | None
) -> tuple[str, str]:
    """Add counts to ranges that are equal as texts although the values differ."""
    if mine != theirs or here is None or there is None:
        return mine, theirs
    if len(here) != len(there):
        return f"{mine}, {len(here)} values", f"{theirs}, {len(there)} values"
    count = sum(not _near(a, b) for a, b in zip(here, there, strict=True))
    return mine, f"{theirs}, {count} of {len(there)} differ"
