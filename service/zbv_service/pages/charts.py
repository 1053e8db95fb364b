"""Charts that need no script: SVG whose positions are percentages, drawn by ``charts.html.j2``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from zbv_solver.export import quantities

_ROUND = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Numbers at a logarithmic axis, times powers of ten."""

Ticks = list[tuple[float, str]]
"""Positions on an axis, with their texts."""
MOST_DRAWN = 400
"""Points that a curve has at most: a screen has about twice as many columns."""

T = TypeVar("T")
Line = tuple[float, float, float, float]
"""A line from ``x1, y1`` to ``x2, y2``; y points downwards."""


@dataclass(frozen=True)
class Scale:
    """An axis of a chart."""

    first: float
    last: float
    """The values at the left and the right end, or at the top and the bottom."""
    is_logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value, in percent."""
        if self.is_logarithmic:
            return percent(math.log(value / self.first) / math.log(self.last / self.first))
        return percent((value - self.first) / (self.last - self.first))

    def shows(self, value: float) -> bool:
        """Whether a value is on the axis."""
        return min(self.first, self.last) <= value <= max(self.first, self.last)

    def ticks(self, most: int, write: Callable[[float], str] = quantities.figure) -> Ticks:
        """About this many round numbers, with their texts; on a logarithmic axis as many as there are."""
        low, high = sorted((self.first, self.last))
        if self.is_logarithmic:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            values = [step * 10.0**power for power in powers for step in _ROUND]
        else:
            values = list(quantities.ticks(low, high, most))
        return [(self(value), write(value)) for value in values if self.shows(value)]


def stairs(corners: Sequence[tuple[float, float]], last: float) -> Iterator[Line]:
    """The lines of a value that changes at some places: alternately horizontal and vertical ones.

    ``corners`` are the places with the values from there on, which end at ``last``.
    """
    for (x, y), (after, then) in pairwise(corners):
        yield x, y, after, y
        yield after, y, after, then
    if corners:
        x, y = corners[-1]
        yield x, y, last, y


def evenly(found: Sequence[T], most: int = MOST_DRAWN) -> list[T]:
    """At most so many of some things, evenly spread, with the first and the last."""
    if len(found) <= most:
        return list(found)
    return [found[index * (len(found) - 1) // (most - 1)] for index in range(most)]


def strips(places: Sequence[float]) -> list[tuple[float, float]]:
    """Left end and width of what belongs to each of some ascending places on an axis, in percent."""
    middles = [(one + other) / 2 for one, other in pairwise(places)]
    ends = [(0.0, *middles)[index] for index in range(len(places))]
    return [(left, round(right - left, 3)) for left, right in zip(ends, (*middles, 100.0), strict=True)]


def percent(part: float) -> float:
    """A share of a chart's side as a percentage, rounded to the resolution of a screen."""
    return round(100 * part, 3) + 0.0  # no -0.0
