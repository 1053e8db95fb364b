"""Several schedules above each other on one time axis, drawn by ``static/lanes.js``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zbv_solver.export import quantities, report
from zbv_solver.export.timeline import MAX_GLYPHS, Timeline, timeline_facts, timeline_text
from zbv_solver.problem.problem import Problem

_ALL_ROWS = 720
_LEAST_ROWS = 110
"""Pixels for the rows of all lanes together, and for those of one lane at least."""


@dataclass(frozen=True, eq=False)
class Lane:
    """A schedule laid out in time."""

    title: str
    line: Timeline
    problem: Problem
    """Gives the placement and costs of the actions."""
    url: str | None = None
    """The address of the packed actions (:mod:`zbv_solver.export.timeline`); if None, the page
    contains them."""
    is_measured: bool = False
    """Whether the times were measured."""
    idle: tuple[float, ...] = ()
    """The idle share of each rank, (p,), shown next to its row."""


def lanes_values(lanes: Sequence[Lane], unit: str) -> dict[str, Any]:
    """What ``lanes.html.j2`` shows of one or more lanes; ``unit`` is the unit of all times."""
    rows, last = max(_LEAST_ROWS, _ALL_ROWS / len(lanes)), len(lanes) - 1
    letters = sorted({code for lane in lanes for code in lane.line.letter.tolist()})
    return {
        "data": report.script_json([_data(lane) for lane in lanes]),
        "canvases": [
            report.gantt_canvas(
                lane.line.pp_degree,
                title=lane.title,
                axis=quantities.titled("time", unit) if index == last else None,
                idle=lane.idle,
                rows=rows,
            )
            for index, lane in enumerate(lanes)
        ],
        "legend": report.legend_of(letters),
        "chunked": any(lane.problem.placement.chunks > 1 for lane in lanes),
        "has_bars": all(len(lane.line) <= MAX_GLYPHS for lane in lanes),
    }


def _data(lane: Lane) -> dict[str, object]:
    facts = timeline_facts(lane.line, lane.problem, is_measured=lane.is_measured)
    data = timeline_text(lane.line, is_measured=lane.is_measured) if lane.url is None else None
    return {"title": lane.title, "facts": facts, "url": lane.url, "data": data}
