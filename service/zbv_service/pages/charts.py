"""Shapes of the charts that need no script. Positions are percentages of the chart; y points downwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """A number on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True)
class Box:
    """A rectangle; ``text`` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    text: str = ""


def percent(part: float) -> float:
    """A share of a chart's side as a percentage, rounded to the resolution of a screen."""
    return round(100 * part, 3)
