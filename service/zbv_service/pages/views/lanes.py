"""Several schedules above each other on one time axis, drawn by ``static/lanes.js``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from zbv_solver.export import palette, quantities, report
from zbv_solver.export.timeline import Timeline
from zbv_solver.export.timeline_data import MAX_GLYPHS, timeline_facts, timeline_text
from zbv_solver.problem.problem import LETTERS, Problem

_ALL_ROWS = 720
_LEAST_ROWS = 110
"""Pixels for the rows of all lanes together, and of one at least."""
_TITLE_HEIGHT, _AXIS_HEIGHT = 22, 26


@dataclass(frozen=True, eq=False)
class Lane:
    """A schedule laid out in time.

    Attributes
    ----------
    problem
        Whose placement and costs its actions have.
    url
        Where its actions are, packed (:mod:`zbv_solver.export.timeline_data`); None has the page carry them.
    is_measured
        Whether actions took other times than the problem says.
    idle
        The share of its time that each rank is idle, (p,); told beside its row.
    """

    title: str
    line: Timeline
    problem: Problem
    url: str | None = None
    is_measured: bool = False
    idle: tuple[float, ...] = ()


@dataclass(frozen=True)
class LanesView:
    """What the template hands to the script.

    Attributes
    ----------
    chart, rules, lanes
        JSON: the Bokeh layout, its colours, and each lane's facts and actions.
    legend
        Letter, name and style of the letters that are drawn.
    has_bars
        Whether every action is drawn one by one from the start.
    """

    chart: Markup
    rules: Markup
    lanes: Markup
    legend: tuple[tuple[str, str, str], ...]
    chunked: bool
    has_bars: bool


def lanes_view(lanes: Sequence[Lane], unit: str) -> LanesView:
    """One or more lanes as a chart; ``unit`` is that of all their times."""
    # Imported here: Bokeh takes half a second, which a service need not spend before it draws.
    from bokeh.layouts import column
    from bokeh.models import Title
    from zbv_solver.export.bokeh_parts import FONT, Colours
    from zbv_solver.export.gantt import gantt_figure, overview_figure, time_range

    colours, x_range = Colours(), time_range(*(lane.line for lane in lanes))
    height = max(_LEAST_ROWS, _ALL_ROWS / len(lanes))
    figures = []
    for index, lane in enumerate(lanes):
        figure = gantt_figure(
            lane.line,
            x_range,
            colours,
            name=_name(index),
            unit=unit,
            has_toolbar=index == 0,
            has_title=index + 1 == len(lanes),
            height=height,
            notes=[quantities.percent(share, 1) for share in lane.idle] or None,
            note="idle",
        )
        figure.height += _TITLE_HEIGHT
        if index + 1 < len(lanes):
            figure.xaxis.visible = False  # the last one's serves all
            figure.height -= _AXIS_HEIGHT
        figure.title = Title(text=lane.title, text_font=FONT, text_font_size="13px", standoff=4)
        colours.paint(figure.title, text_color="text")
        figures.append(figure)
    figures.append(overview_figure(lanes[0].line, x_range, colours))
    layout = column(*figures, sizing_mode="stretch_width", spacing=2)
    letters = sorted({code for lane in lanes for code in set(lane.line.letter.tolist())})
    return LanesView(
        chart=report.script_json(report.chart_item(layout)),
        rules=report.script_json(colours.rules),
        lanes=report.script_json([_sent(index, lane) for index, lane in enumerate(lanes)]),
        legend=tuple((LETTERS[code], palette.NAMES[LETTERS[code]], LETTERS[code]) for code in letters),
        chunked=any(lane.problem.placement.chunks > 1 for lane in lanes),
        has_bars=all(len(lane.line) <= MAX_GLYPHS for lane in lanes),
    )


def _name(index: int) -> str:
    return f"lane{index}"


def _sent(index: int, lane: Lane) -> dict[str, object]:
    facts = timeline_facts(lane.line, lane.problem, is_measured=lane.is_measured)
    data = timeline_text(lane.line, is_measured=lane.is_measured) if lane.url is None else None
    return {"name": _name(index), "title": lane.title, "facts": facts, "url": lane.url, "data": data}
