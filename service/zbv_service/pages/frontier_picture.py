"""The frontier as an SVG that needs no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zbv_solver.export import quantities
from zbv_solver.frontiers.limits import LARGEST, Known, fits, staircase
from zbv_solver.problem.problem import Units

from zbv_service.frontier.points import Frontier, Point
from zbv_service.pages.charts import Box, Line, Tick, percent

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

    @property
    def end(self) -> float:
        """The end of the axis."""
        return self.last + _RIGHT_MARGIN * (self.last - self.begin)

    def shows(self, needs: float) -> bool:
        """Whether an amount is on the axis."""
        return fits(needs, self.last)

    def place(self, at: float) -> float:
        """The position of an amount, in percent."""
        inside = min(max(at, self.begin), self.end)
        return percent((inside - self.begin) / (self.end - self.begin))

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
        return self._scale[1]

    def ticks(self) -> list[tuple[float, str]]:
        """Round amounts on the axis with their texts."""
        scale, _ = self._scale
        rounded = quantities.ticks(self.begin / scale, self.last / scale, _X_TICKS)
        return [(at * scale, quantities.figure(at)) for at in rounded]

    @property
    def _scale(self) -> tuple[float, str]:
        return (1.0, "") if self.units is None else quantities.memory_scale(self.last, self.units)


@dataclass(frozen=True)
class Mark:
    """A schedule; ``style`` is own, corner, beaten or baseline."""

    x: float
    y: float
    style: str
    name: str
    text: str
    url: str | None = None
    is_left: bool = False


@dataclass(frozen=True)
class PointMark:
    """A limit on the axis; ``state`` as in the table."""

    x: float
    state: str
    text: str


@dataclass(frozen=True)
class Picture:
    """The frontier over memory; ``infeasible`` is the position of the smallest limit that a plan fits."""

    summary: str
    x_unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    infeasible: float
    below: tuple[Box, ...]
    bound: tuple[Line, ...]
    steps: tuple[Line, ...]
    marks: tuple[Mark, ...]
    asked: tuple[PointMark, ...]
    beyond: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """The positions of memory and values, in percent."""

    axis: Axis
    low: float
    high: float

    def x(self, at: float) -> float:
        return self.axis.place(at)

    def y(self, value: float) -> float:
        return percent((self.high - value) / (self.high - self.low))

    def line(self, at: float, value: float, to: float, until: float) -> Line:
        return Line(self.x(at), self.y(value), self.x(to), self.y(until))


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


def picture_of(found: Frontier, root: str) -> Picture:
    """The frontier over memory; ``root`` is the prefix of addresses."""
    axis, units = Axis.of(found), found.units
    plans = [each for each in found.plans if axis.shows(each.needs)]
    baselines = [each for each in found.baselines if axis.shows(each.needs)]
    bounds = [point.bound for point in found.points if point.bound is not None]
    values = [*(each.value for each in (*baselines, *plans)), *bounds] or [1.0]
    low, high = min(values), max(values)
    margin = _MARGIN * (high - low or high or 1.0)
    place = _Place(axis, max(0.0, low - 1.6 * margin), high + margin)
    corners = staircase(plans)
    pieces = _bound_pieces(found.points)
    return Picture(
        summary=_summary(found, corners, axis),
        x_unit=axis.unit,
        x_ticks=tuple(Tick(place.x(at), text) for at, text in axis.ticks()),
        y_ticks=tuple(
            Tick(place.y(at), quantities.figure(at))
            for at in quantities.ticks(place.low, place.high, _Y_TICKS)
        ),
        infeasible=place.x(found.points[0].at),
        below=tuple(_below(place, *piece) for piece in pieces),
        bound=tuple(place.line(*ends) for ends in _bound_line(found.points, pieces)),
        steps=tuple(place.line(*ends) for ends in _stairs(corners, axis.last)),
        marks=(
            *_baseline_marks(baselines, place, units),
            *_plan_marks(found.own, plans, corners, place, units, root),
        ),
        asked=tuple(_point_mark(point, axis) for point in found.points),
        beyond=tuple(
            f"{name} needs {axis.said(each.needs)}: {quantities.time(each.value, units)}"
            for name, each in (("this plan", found.own), *((each.name, each) for each in found.baselines))
            if not axis.shows(each.needs)
        ),
    )


def _point_mark(point: Point, axis: Axis) -> PointMark:
    state, says = point_state(point)
    return PointMark(axis.place(point.at), state, f"{axis.said(point.at)}: {says}")


def _bound_pieces(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    """Start, end and bound between them: the bound of a limit holds down to the limit before it."""
    return [(before.at, at.at, at.bound) for before, at in pairwise(points) if at.bound is not None]


def _below(place: _Place, start: float, end: float, bound: float) -> Box:
    """The area below a piece of the bound."""
    x, y = place.x(start), place.y(bound)
    return Box(x, y, round(place.x(end) - x, 3), round(100 - y, 3))


def _bound_line(
    points: Sequence[Point], pieces: Sequence[tuple[float, float, float]]
) -> list[tuple[float, float, float, float]]:
    """The lines of the bound, with a vertical one at the smallest limit, up to the bound there."""
    lines = [(start, bound, end, bound) for start, end, bound in pieces]
    first = points[0]
    if lines and first.bound is not None and lines[0][0] == first.at:
        lines.insert(0, (first.at, first.bound, first.at, lines[0][1]))
    return lines


def _stairs(corners: Sequence[Known], last: float) -> Iterator[tuple[float, float, float, float]]:
    """The lines of the running minimum, alternately horizontal and vertical, up to the last limit."""
    for corner, after in pairwise(corners):
        yield corner.needs, corner.value, after.needs, corner.value
        yield after.needs, corner.value, after.needs, after.value
    if corners:
        yield corners[-1].needs, corners[-1].value, last, corners[-1].value


def _baseline_marks(baselines: Sequence[Known], place: _Place, units: Units) -> Iterator[Mark]:
    """The classical schedules; those that would overlap share the mark of the first."""
    groups: list[list[Known]] = []
    for each in baselines:
        for group in groups:
            if _overlap(each, group[0], place):
                group.append(each)
                break
        else:
            groups.append([each])
    for group in groups:
        x, y = place.x(group[0].needs), place.y(group[0].value)
        name = ", ".join(each.name for each in group)
        yield Mark(x, y, "baseline", name, _said(group[0], name, place, units), None, x > _LEFT_FROM)


def _overlap(one: Known, other: Known, place: _Place) -> bool:
    across = abs(place.x(one.needs) - place.x(other.needs))
    return across < _OVERLAP and abs(place.y(one.value) - place.y(other.value)) < _OVERLAP


def _plan_marks(
    own: Known, plans: Sequence[Known], corners: Sequence[Known], place: _Place, units: Units, root: str
) -> Iterator[Mark]:
    """The plans. Later marks cover earlier ones, so the corners come late and the plan itself last."""
    for each in sorted(plans, key=lambda each: (each == own, each in corners)):
        x, y, url = place.x(each.needs), place.y(each.value), f"{root}/plans/{each.name}"
        if each == own:
            text = _said(each, "this plan", place, units)
            yield Mark(x, y, "own", "this plan", text, url, x > _LEFT_FROM)
        else:
            style, name = "corner" if each in corners else "beaten", each.name[:12]
            yield Mark(x, y, style, name, _said(each, f"plan {name}", place, units), url)


def _said(each: Known, name: str, place: _Place, units: Units) -> str:
    return f"{name}: {quantities.time(each.value, units)}, {place.axis.needs(each.needs)}"


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
