"""All layouts of a search as an SVG that needs no script: step time over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zbv_solver.export import quantities

from zbv_service.pages.charts import Tick, percent

WIDTH, HEIGHT = 1000, 500
"""The grid of small dots; dots in the same place are drawn once."""
SLOWEST = 10.0
"""The longest step in the picture, as a multiple of the best."""
LARGEST = 1.5
"""The most memory in the picture, as a multiple of a device's."""
GIGA = 1e9
STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Numbers at the logarithmic axis, times powers of ten."""
LOWEST = 0.93
MOST_MARKS = 200


@dataclass(frozen=True)
class LayoutMark:
    """A planned layout; ``url`` leads to the plan of a listed one."""

    x: float
    y: float
    text: str
    url: str | None = None
    is_best: bool = False


@dataclass(frozen=True)
class LayoutPicture:
    """The picture."""

    summary: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    memory: float
    """The position of a device's memory."""
    bound: float | None
    """The position of the bound for all layouts; None if it is below the picture."""
    slower: str
    too_large: str
    """SVG paths of dots."""
    marks: tuple[LayoutMark, ...]
    counts: tuple[int, int, int]
    """How many layouts were planned, are slower, and do not fit."""
    outside: int
    """How many are outside the picture."""


@dataclass(frozen=True)
class _Axes:
    low: float
    high: float
    most: float

    def x(self, memory: float) -> float:
        return memory / self.most

    def y(self, step: float) -> float:
        return math.log(self.high / step) / math.log(self.high / self.low)

    def shows(self, step: float, memory: float) -> bool:
        return self.low <= step <= self.high and 0 <= memory <= self.most


def layout_picture(answer: Mapping[str, Any], memory: float, root: str) -> LayoutPicture:
    """The picture of an answer; without ``points`` it has the listed layouts only."""
    layouts, points = answer["layouts"], answer.get("points", {})
    best = layouts[0]["step_time"]
    below = answer["proof"]["no_layout_below"]
    axes = _Axes(min(best, below) * LOWEST, best * SLOWEST, memory * LARGEST)
    slower, too_large = _places(points.get("bounded")), _places(points.get("too_large"))
    planned = _planned(points.get("planned"), layouts)
    marks = [
        LayoutMark(percent(axes.x(at)), percent(axes.y(step)), _said(step, at, "planned"))
        for step, at in planned[:MOST_MARKS]
        if axes.shows(step, at)
    ]
    marks += [
        LayoutMark(
            percent(axes.x(each["peak_memory"])),
            percent(axes.y(each["step_time"])),
            _said(each["step_time"], each["peak_memory"], _name(each)),
            f"{root}/plans/{each['plan_id']}",
            each is layouts[0],
        )
        for each in reversed(layouts)
        if axes.shows(each["step_time"], each["peak_memory"])
    ]
    dots = [*slower, *too_large]
    return LayoutPicture(
        summary=f"Step time over memory of {len(planned) + len(layouts) + len(dots):,} layouts. "
        f"The best takes {quantities.figure(best)} s.",
        x_ticks=tuple(
            Tick(percent(axes.x(at * GIGA)), quantities.figure(at))
            for at in quantities.ticks(0.0, axes.most / GIGA, 8)
        ),
        y_ticks=tuple(
            Tick(percent(axes.y(at)), quantities.figure(at)) for at in _log_ticks(axes.low, axes.high)
        ),
        memory=percent(axes.x(memory)),
        bound=percent(axes.y(below)) if below > axes.low else None,
        slower=_path(slower, axes),
        too_large=_path(too_large, axes),
        marks=tuple(marks),
        counts=(len(planned) + len(layouts), len(slower), len(too_large)),
        outside=sum(not axes.shows(*each) for each in dots),
    )


def _places(columns: Mapping[str, Any] | None) -> list[tuple[float, float]]:
    if not columns:
        return []
    return list(zip(columns["step_time"], columns["peak_memory"], strict=True))


def _planned(columns: Mapping[str, Any] | None, listed: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Planned layouts that are not listed: the listed ones come first."""
    return sorted(_places(columns))[len(listed) :]


def _path(dots: Iterable[tuple[float, float]], axes: _Axes) -> str:
    places = {
        (round(axes.x(memory) * WIDTH), round(axes.y(step) * HEIGHT))
        for step, memory in dots
        if axes.shows(step, memory)
    }
    return "".join(f"M{x} {y}h.01" for x, y in sorted(places))


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in STEPS]
    return [each for each in found if low <= each <= high]


def _name(layout: Mapping[str, Any]) -> str:
    return (
        f"tensor {layout['tensor_parallel']}, context {layout['context_parallel']}, "
        f"expert {layout['expert_parallel']}, data {layout['data_parallel']}, "
        f"pipeline {layout['pipeline_parallel']}, microbatches of {layout['microbatch_size']}, "
        f"ZeRO {layout['zero_stage']}"
    )


def _said(step: float, memory: float, name: str) -> str:
    return f"{name}: {quantities.figure(step)} s, {memory / GIGA:.3g} GB"
