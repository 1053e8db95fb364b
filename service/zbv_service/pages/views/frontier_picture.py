"""The frontier as an SVG that needs no script: positions are percentages of its area."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zbv_solver.export import quantities
from zbv_solver.export.axis import ticks
from zbv_solver.frontiers.limits import Known, staircase

from zbv_service.frontier.points import Frontier, Point
from zbv_service.pages.views.frontier_axis import Axis

_MARGIN = 0.08
_APART = 1.5
"""Percent of the area: closer marks overlap."""
_LEFT_FROM = 70
"""Percent from the left beyond which the name of a mark is at its left."""
_TICKS = 6


@dataclass(frozen=True)
class Tick:
    """A number on an axis; ``at`` is its position in percent."""

    at: float
    text: str


@dataclass(frozen=True)
class ChartSegment:
    """A straight line, in percent of the area."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True)
class Box:
    """A rectangle, in percent of the area."""

    x: float
    y: float
    width: float
    height: float


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
    """The frontier over memory, in percent of its area; y points downwards."""

    summary: str
    x_unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    infeasible: float
    below: tuple[Box, ...]
    bound: tuple[ChartSegment, ...]
    steps: tuple[ChartSegment, ...]
    marks: tuple[Mark, ...]
    asked: tuple[PointMark, ...]
    beyond: tuple[str, ...]


def state_of(point: Point) -> tuple[str, str]:
    """The state of a limit: a word for its colour, and the words of the table."""
    if point.is_open and point.search is not None:
        return point.search.state, {"queued": "queued"}.get(point.search.state, "being searched")
    if point.is_proved:
        return "optimal", "proved optimal"
    if point.is_searched:
        is_empty = point.search is not None and point.search.state == "infeasible"
        return ("infeasible", "no plan fits") if is_empty else ("done", "searched")
    if point.search is not None:
        return point.search.state, {"done": "searched"}.get(point.search.state, point.search.state)
    return "missing", "not searched yet"


@dataclass(frozen=True)
class _Place:
    """The positions of memory and values, in percent."""

    axis: Axis
    low: float
    high: float

    def x(self, at: float) -> float:
        return self.axis.place(at)

    def y(self, value: float) -> float:
        return round(100 * (self.high - value) / (self.high - self.low), 3)


def picture_of(found: Frontier, root: str) -> Picture:
    """The frontier over memory; ``root`` is the prefix of addresses."""
    axis = Axis.of(found)
    units = found.problem.units
    inside = [each for each in found.baselines if axis.shows(each.needs)]
    shown = [each for each in found.plans if axis.shows(each.needs)]
    bounds = [point.bound for point in found.points if point.bound is not None]
    values = [*(each.value for each in (*inside, *shown)), *bounds] or [1.0]
    low, high = min(values), max(values)
    pad = _MARGIN * (high - low or high or 1.0)
    low, high = max(0.0, low - 1.6 * pad), high + pad

    place = _Place(axis, low, high)
    x, y = place.x, place.y
    corners = staircase(shown)
    pieces = _bound_pieces(found.points)
    return Picture(
        summary=_summary(found, corners, axis),
        x_unit=axis.unit,
        x_ticks=tuple(Tick(x(at), text) for at, text in axis.ticks()),
        y_ticks=tuple(Tick(y(at), quantities.figure(at)) for at in _ticks(low, high)),
        infeasible=x(found.points[0].at),
        below=tuple(Box(x(a), y(v), round(x(b) - x(a), 3), round(100 - y(v), 3)) for a, b, v in pieces),
        bound=tuple(ChartSegment(x(a), y(v), x(b), y(w)) for a, v, b, w in _bound_line(found.points, pieces)),
        steps=tuple(ChartSegment(x(a), y(v), x(b), y(w)) for a, v, b, w in _stairs(corners, axis.last)),
        marks=tuple(_marks(found, shown, corners, place, root)),
        asked=tuple(
            PointMark(x(p.at), state_of(p)[0], f"{axis.said(p.at)}: {state_of(p)[1]}") for p in found.points
        ),
        beyond=tuple(
            f"{name} needs {axis.said(each.needs)}: {quantities.time(each.value, units)}"
            for name, each in (("this plan", found.own), *((each.name, each) for each in found.baselines))
            if not axis.shows(each.needs)
        ),
    )


def _bound_line(
    points: Sequence[Point], pieces: Sequence[tuple[float, float, float]]
) -> list[tuple[float, float, float, float]]:
    """The lines of the bound, with a vertical one at the smallest limit, up to the bound there."""
    lines = [(start, bound, end, bound) for start, end, bound in pieces]
    first = points[0]
    if lines and first.bound is not None and lines[0][0] == first.at:
        lines.insert(0, (first.at, first.bound, first.at, lines[0][1]))
    return lines


def _bound_pieces(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    """Start, end and bound between them: the bound of a limit holds down to the limit before it."""
    pieces = []
    for before, point in pairwise(points):
        if point.bound is not None:
            pieces.append((before.at, point.at, point.bound))
    return pieces


def _stairs(corners: Sequence[Known], last: float) -> list[tuple[float, float, float, float]]:
    """The lines of the running minimum, alternately horizontal and vertical, up to the last limit."""
    pieces = []
    for at, corner in enumerate(corners):
        is_last = at + 1 == len(corners)
        until = last if is_last else corners[at + 1].needs
        pieces.append((corner.needs, corner.value, until, corner.value))
        if not is_last:
            pieces.append((until, corner.value, until, corners[at + 1].value))
    return pieces


def _marks(
    found: Frontier, shown: Sequence[Known], corners: Sequence[Known], place: _Place, root: str
) -> Iterator[Mark]:
    """The schedules; those that must not be covered come last."""
    units, axis = found.problem.units, place.axis

    def said(each: Known, name: str) -> str:
        return f"{name}: {quantities.time(each.value, units)}, {axis.needs(each.needs)}"

    for x, y, names in _at_places([each for each in found.baselines if axis.shows(each.needs)], place):
        first = next(each for each in found.baselines if each.name == names[0])
        name = ", ".join(names)
        yield Mark(x, y, "baseline", name, said(first, name), None, x > _LEFT_FROM)
    for each in sorted(shown, key=lambda each: each in corners):
        if each != found.own:
            style, name = "corner" if each in corners else "beaten", each.name[:12]
            url = f"{root}/plans/{each.name}"
            yield Mark(place.x(each.needs), place.y(each.value), style, name, said(each, f"plan {name}"), url)
    own = found.own
    if axis.shows(own.needs):
        url, at = f"{root}/plans/{own.name}", place.x(own.needs)
        yield Mark(at, place.y(own.value), "own", "this plan", said(own, "this plan"), url, at > _LEFT_FROM)


def _at_places(schedules: Sequence[Known], place: _Place) -> list[tuple[float, float, list[str]]]:
    """The positions of baselines; those that would overlap share one mark."""
    found: list[tuple[float, float, list[str]]] = []
    for each in schedules:
        x, y = place.x(each.needs), place.y(each.value)
        for other_x, other_y, names in found:
            if abs(x - other_x) < _APART and abs(y - other_y) < _APART:
                names.append(each.name)
                break
        else:
            found.append((x, y, [each.name]))
    return found


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values."""
    step = ticks(high - low, _TICKS)
    width = step[1] if len(step) > 1 else 1.0
    first = math.ceil(low / width - 1e-9)
    return [index * width for index in range(first, math.floor(high / width + 1e-9) + 1)]


def _summary(found: Frontier, corners: Sequence[Known], axis: Axis) -> str:
    units, objective = found.problem.units, found.problem.objective
    if not corners:
        whole = " the memory of 1F1B" if axis.units is None else ""
        return f"No plan is known up to {axis.said(axis.last)}{whole}."
    least, best = corners[0], corners[-1]
    text = f"Best known {objective}: {quantities.time(best.value, units)} with {axis.said(best.needs)} memory"
    if least != best:
        text += f"; with {axis.said(least.needs)} it is {quantities.time(least.value, units)}"
    return f"{text}."
