"""``/plans/{plan_id}/frontier``: time against memory as a chart and a table; searches for missing points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from zbv_solver.export import quantities
from zbv_solver.frontiers.limits import LARGEST, Known, fits, staircase
from zbv_solver.plans.plan import gap_of
from zbv_solver.problem.problem import Units
from zbv_solver.search.options import EFFORTS

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.frontier.problems import CutSummary, Frontier, FrontierPlan, Point
from zbv_service.pages.charts import Line, Scale, Ticks, stairs
from zbv_service.pages.shell import page
from zbv_service.pages.words import placement_name, shape_of
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

MAX_FORM_BYTES = 1024
_MOST_POINTS = 1000
_RIGHT_MARGIN = 0.04
"""Room beyond the last limit, as a share of the range."""
_LEFT_MARGIN = 0.12
"""Room below the smallest limit, as a share of the range, if amounts do not start at 0."""
_MARGIN = 0.08
"""Room above the largest value, as a share of the range."""
_OVERLAP = 1.5
"""Marks closer than this, in percent of the area, overlap."""
_LEFT_FROM = 70
"""Percent of the width from which on the name of a mark is at its left."""
_X_TICKS, _Y_TICKS = 8, 6

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
    values = await found.computations.write(partial(frontier_values, plan, frontier, root_of(request)))
    efforts = EFFORTS[: EFFORTS.index(found.settings.max_effort) + 1]
    counts = {"refused": refused, "known": known}
    return await page(request, "frontier.html.j2", efforts=efforts, **counts, **values)


@router.post("/plans/{plan_id}/frontier", dependencies=[needs("search"), STORES["searches"]])
async def post_frontier(request: Request, plan_id: str) -> Response:
    """Search the missing points, as many as the caller may have open; the others wait."""
    form = parse_qs(await read_form(request, MAX_FORM_BYTES))
    found = state_of(request)
    asked = await found.frontiers.search_missing(
        plan_id,
        form.get("effort", ["standard"])[0],
        grant_of(request),
        again="again" in form,
    )
    query = ""
    if asked.refused:
        query = f"?refused={min(asked.refused, _MOST_POINTS)}"
    elif asked.known and not asked.searched:
        query = f"?known={min(asked.known, _MOST_POINTS)}"
    return RedirectResponse(f"{root_of(request)}/plans/{quote(plan_id)}/frontier{query}", 303)


def frontier_values(plan: FrontierPlan, found: Frontier | None, root: str) -> dict[str, Any]:
    """What the template shows of a frontier; ``found`` is None if the problem has no memory costs."""
    values: dict[str, Any] = {
        "plan": plan,
        "facts": plan.facts,
        "title": shape_of(plan.facts),
        "has_own_cuts": plan.own_cut is not None,
        "found": found,
        "point_state": point_state,
        "cut_text": cut_text,
        "time": quantities.time if found is None else quantities.timer(found.own.value, found.units),
        "gap_of": gap_of,
    }
    if found is None:
        return values
    return {
        **values,
        "axis": Axis.of(found),
        "picture": picture_of(found, root),
        "improvable": sum(not point.is_proved and not point.is_open for point in found.points),
        "has_bounds": all(point.bound is not None for point in found.points),
    }


@dataclass(frozen=True)
class Axis:
    """The memory axis: fractions of 1F1B's memory, or amounts if every limit has its own cut."""

    begin: float
    last: float
    """The last limit."""
    units: Units | None
    """The units of the amounts; None for fractions."""

    @classmethod
    def of(cls, found: Frontier) -> Axis:
        """The axis of a frontier. With amounts, it includes the memory that the plan itself needs."""
        if found.cuts is None:
            return cls(0.0, LARGEST, None)
        least, last = found.points[0].at, max(found.points[-1].at, found.own.needs)
        begin = max(0.0, least - _LEFT_MARGIN * ((last - least) or last))
        return cls(begin, last, found.units)

    @cached_property
    def scale(self) -> Scale:
        """The axis in the chart."""
        return Scale(self.begin, self.last + _RIGHT_MARGIN * (self.last - self.begin))

    def shows(self, needs: float) -> bool:
        """Whether an amount is on the axis."""
        return fits(needs, self.last)

    def place(self, at: float) -> float:
        """The position of an amount, in percent; amounts outside are at the ends."""
        return self.scale(min(max(at, self.scale.first), self.scale.last))

    def said(self, at: float) -> str:
        """An amount: ``0.75 ×``, ``37.4 GiB``."""
        return (
            f"{quantities.figure(at, 3)}\u202f×" if self.units is None else quantities.memory(at, self.units)
        )

    def needs(self, at: float) -> str:
        """The memory that a schedule needs, as the end of a sentence."""
        if self.units is None:
            return f"needs {self.said(at)} 1F1B's memory"
        return f"needs {self.said(at)} on its fullest rank"

    @property
    def unit(self) -> str:
        """The unit of the numbers at its ticks; empty for fractions."""
        return self._unit[1]

    def ticks(self) -> Ticks:
        """Round amounts, with their texts."""
        unit, _ = self._unit
        rounded = quantities.ticks(self.begin / unit, self.last / unit, _X_TICKS)
        return [(self.place(at * unit), quantities.figure(at)) for at in rounded]

    @property
    def _unit(self) -> tuple[float, str]:
        return (1.0, "") if self.units is None else quantities.memory_scale(self.last, self.units)


def point_state(point: Point) -> tuple[str, str]:
    """The state of a limit: the name of its colour, and the words in the table."""
    if point.is_open and point.search is not None:
        return point.search.state, "queued" if point.search.state == "queued" else "being searched"
    if point.is_proved:
        return "optimal", "proved optimal"
    if point.is_searched:
        is_empty = point.search is not None and point.search.state == "infeasible"
        return ("infeasible", "no plan fits") if is_empty else ("done", "searched")
    if point.search is not None:
        state = point.search.state
        return state, "searched" if state == "done" else state
    return "missing", "not searched yet"


def cut_text(cut: CutSummary) -> str:
    """The placement of a plan and its recomputed stages."""
    recomputed = (
        f"{cut.recomputed} of {quantities.counted(cut.stages, 'stage')}" if cut.recomputed else "nothing"
    )
    return f"{placement_name(cut.placement, cut.chunks)}, {recomputed} recomputed"


def picture_of(found: Frontier, root: str) -> dict[str, Any]:
    """The chart of a frontier; ``root`` is the prefix of addresses."""
    axis, units = Axis.of(found), found.units
    plans = [known for known in found.plans if axis.shows(known.needs)]
    baselines = [known for known in found.baselines if axis.shows(known.needs)]
    bounds = [point.bound for point in found.points if point.bound is not None]
    values = [*(known.value for known in (*baselines, *plans)), *bounds] or [1.0]
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low or high or 1.0)
    chart = _Chart(axis, Scale(high + margin, max(0.0, low - 1.6 * margin)), units, root)
    corners = staircase(plans)
    best = stairs([(known.needs, known.value) for known in corners], axis.last)
    pieces = _bound_pieces(found.points)
    return {
        "summary": _summary(found, corners, axis),
        "x_ticks": axis.ticks(),
        "y_ticks": chart.y.ticks(_Y_TICKS, quantities.timer(found.own.value, units)),
        "infeasible": axis.place(found.points[0].at),
        "below": [chart.line(start, bound, end, bound) for start, end, bound in pieces],
        "bound": [chart.line(*ends) for ends in _bound_line(found.points, pieces)],
        "steps": [chart.line(*ends) for ends in best],
        "marks": [*chart.baselines(baselines), *chart.plans(found.own, plans, corners)],
        "beyond": [
            f"{name} needs {axis.said(known.needs)}: {quantities.time(known.value, units)}"
            for name, known in (("this plan", found.own), *((known.name, known) for known in found.baselines))
            if not axis.shows(known.needs)
        ],
    }


@dataclass(frozen=True)
class _Chart:
    axis: Axis
    y: Scale
    units: Units
    root: str

    def line(self, at: float, value: float, to: float, until: float) -> Line:
        return self.axis.place(at), self.y(value), self.axis.place(to), self.y(until)

    def mark(self, known: Known, style: str, name: str, url: str | None, text: str = "") -> dict[str, Any]:
        x = self.axis.place(known.needs)
        needs = f"{quantities.time(known.value, self.units)}, {self.axis.needs(known.needs)}"
        return {
            "x": x,
            "y": self.y(known.value),
            "style": style,
            "name": name,
            "text": f"{text or name}: {needs}",
            "url": url,
            "is_left": x > _LEFT_FROM,
        }

    def baselines(self, baselines: Sequence[Known]) -> Iterator[dict[str, Any]]:
        """The classical schedules; those that would overlap share the mark of the first."""
        groups: list[list[Known]] = []
        for known in baselines:
            group = next((group for group in groups if self._overlap(known, group[0])), None)
            if group is None:
                groups.append([known])
            else:
                group.append(known)
        for group in groups:
            yield self.mark(group[0], "baseline", ", ".join(known.name for known in group), None)

    def plans(self, own: Known, plans: Sequence[Known], corners: Sequence[Known]) -> Iterator[dict[str, Any]]:
        """The plans. Later marks cover earlier ones, so the corners come late and the plan itself last."""
        for known in sorted(plans, key=lambda known: (known == own, known in corners)):
            url, name = f"{self.root}/plans/{known.name}", known.name[:12]
            if known == own:
                yield self.mark(known, "own", "this plan", url)
            else:
                yield self.mark(known, "corner" if known in corners else "beaten", name, url, f"plan {name}")

    def _overlap(self, one: Known, other: Known) -> bool:
        x, y, x2, y2 = self.line(one.needs, one.value, other.needs, other.value)
        return abs(x - x2) < _OVERLAP and abs(y - y2) < _OVERLAP


def _bound_pieces(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    """Start, end and bound between them: the bound of a limit holds down to the limit before it."""
    return [(before.at, at.at, at.bound) for before, at in pairwise(points) if at.bound is not None]


def _bound_line(
    points: Sequence[Point], pieces: Sequence[tuple[float, float, float]]
) -> list[tuple[float, float, float, float]]:
    """The lines of the bound, with a vertical one at the smallest limit, up to the bound there."""
    lines = [(start, bound, end, bound) for start, end, bound in pieces]
    first = points[0]
    if lines and first.bound is not None and lines[0][0] == first.at:
        lines.insert(0, (first.at, first.bound, first.at, lines[0][1]))
    return lines


def _summary(found: Frontier, corners: Sequence[Known], axis: Axis) -> str:
    units, objective = found.units, found.objective
    if not corners:
        whole = " the memory of 1F1B" if axis.units is None else ""
        return f"No plan is known up to {axis.said(axis.last)}{whole}."
    least, best = corners[0], corners[-1]
    text = f"Best known {objective}: {quantities.time(best.value, units)} with {axis.said(best.needs)} memory"
    if least != best:
        text += f"; with {axis.said(least.needs)} it is {quantities.time(least.value, units)}"
    return f"{text}."
