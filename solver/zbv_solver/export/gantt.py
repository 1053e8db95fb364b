"""The interactive picture of a plan: Gantt chart, memory lines and an overview, as a Bokeh layout.

Colours that differ between light and dark are listed by :class:`Colours` while the layout is built, so that
the page's script can change them in the browser. Labels and, in large plans, the actions of the visible
window are put in by that script too; the layout alone shows everything else.

Nothing here uses Bokeh's CustomJS: it needs ``eval``, which the pages' content security policy forbids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    ImageRGBA,
    LayoutDOM,
    LinearColorMapper,
    Range1d,
    RangeTool,
)
from bokeh.models.annotations import BoxAnnotation

from zbv_solver.export import palette, quantities
from zbv_solver.export.bokeh_parts import FONT, Colours, navigation, time_figure, tooltip
from zbv_solver.export.memory_chart import accounts_for_memory, memory_figure
from zbv_solver.export.raster import image
from zbv_solver.export.timeline import Timeline, timeline
from zbv_solver.plan import Plan
from zbv_solver.problem import LETTERS

MAX_GLYPHS = 10_000
"""Above this many actions an image of the schedule is drawn, and bars only for what is zoomed into."""

IMAGE_COLUMNS = 1200
OVERVIEW_COLUMNS = 1200
BAR_HEIGHT = 0.84
_TYPICAL_WIDTH = 1000


@dataclass(frozen=True)
class Chart:
    """A layout and the rules by which its colours follow the theme."""

    layout: LayoutDOM
    rules: list[dict[str, str]]
    glyphs: bool


def plan_layout(plan: Plan, *, dark: bool = False) -> LayoutDOM:
    """Gantt chart of all ranks, memory lines and overview, linked, as a Bokeh layout."""
    return plan_chart(plan, dark=dark).layout


def plan_chart(plan: Plan, *, dark: bool = False) -> Chart:
    """As :func:`plan_layout`, with what a page needs to switch themes."""
    line, colours = timeline(plan), Colours(dark)
    x_range = _x_range(line)
    figures = [_gantt(plan, line, x_range, colours)]
    if accounts_for_memory(plan.problem):
        figures.append(memory_figure(plan, line, x_range, colours))
    figures.append(_overview(line, x_range, colours))
    layout = column(*figures, sizing_mode="stretch_width", spacing=2)
    return Chart(layout, colours.rules, len(line) <= MAX_GLYPHS)


def _x_range(line: Timeline) -> Range1d:
    end = line.makespan or 1.0
    margin = 0.012 * end
    longest = float((line.end - line.start).max(initial=0.0)) or end
    return Range1d(
        start=-margin,
        end=end + margin,
        bounds=(-margin, end + margin),
        min_interval=min(end, longest / 8),
        name="time",
    )


def _gantt(plan: Plan, line: Timeline, x_range: Range1d, colours: Colours) -> Any:
    p, units = line.pp_degree, plan.problem.units
    row = min(34.0, max(7.0, 640 / p))
    unit = quantities.time_unit(units)
    says = tooltip(
        "<b>@action</b> @name",
        ("start", f"@left{{0,0.[000]}} {unit}"),
        ("end", f"@right{{0,0.[000]}} {unit}"),
        ("rank", "@rank"),
        ("stage", "@stage (chunk @chunk)"),
        ("microbatch", "@microbatch"),
    )
    hover = HoverTool(tooltips=says, renderers=[], point_policy="follow_mouse")
    tools = [*navigation(), hover]
    figure = time_figure(
        colours,
        height=round(row * p) + 88,
        x_range=x_range,
        tools=tools,
        y_range=Range1d(start=p - 0.5, end=-0.5),
        toolbar_location="above",
        name="gantt",
    )
    figure.toolbar.active_drag, figure.toolbar.active_scroll = tools[0], tools[2]
    every = max(1, int(np.ceil(14 / row)))
    figure.yaxis.ticker = FixedTicker(ticks=list(range(0, p, every)))
    figure.yaxis.major_label_overrides = {rank: f"rank {rank}" for rank in range(p)}
    figure.ygrid.visible = False
    figure.xaxis.axis_label = quantities.titled("time", unit)
    _picture(figure, line, IMAGE_COLUMNS, visible=len(line) > MAX_GLYPHS, name="picture")
    _separators(figure, p, row, colours, visible=len(line) > MAX_GLYPHS)
    bars = _bars(figure, line, colours)
    hover.renderers = [bars]
    _labels(figure)
    # The script draws from this when only a part is visible; Bokeh carries it as packed binary.
    figure.tags = [_packed(line), _facts(plan, line)]
    return figure


def _picture(figure: Any, line: Timeline, columns: int, *, visible: bool, name: str) -> None:
    if not visible:
        return
    p = line.pp_degree
    # Rows of an image count upwards from y; the axis runs downwards, so rank 0 stays the first row.
    source = ColumnDataSource({"image": [image(line, columns)], "x": [0.0], "dw": [line.makespan or 1.0]})
    glyph = ImageRGBA(image="image", x="x", y=-0.5, dw="dw", dh=p)
    figure.add_glyph(source, glyph, name=name, level="glyph")  # above the grid


def _separators(figure: Any, p: int, row: float, colours: Colours, *, visible: bool) -> None:
    """Gaps between the ranks of the picture, which bars have by themselves."""
    if not visible or p < 2:
        return
    renderer = figure.hspan(
        y=[rank + 0.5 for rank in range(p - 1)],
        line_width=max(1.0, (1 - BAR_HEIGHT) * row),
        level="glyph",
        name="separators",
    )
    colours.paint(renderer.glyph, line_color="background")


def _bars(figure: Any, line: Timeline, colours: Colours) -> Any:
    """One bar per action; empty in a large plan until the script fills in what is visible."""
    shown = slice(0, len(line) if len(line) <= MAX_GLYPHS else 0)
    columns = {
        "left": line.start[shown],
        "right": line.end[shown],
        "rank": line.rank[shown],
        "kind": line.kind[shown].astype(np.int32),
        "stage": line.stage[shown],
        "chunk": line.chunk[shown],
        "microbatch": line.microbatch[shown],
        "action": [line.text(index) for index in range(shown.stop)],
        "name": [palette.NAMES[LETTERS[code]] for code in line.letter[shown].tolist()],
    }
    mapper = LinearColorMapper(palette=palette.KIND_FILLS, low=-0.5, high=len(palette.KIND_FILLS) - 0.5)
    roomy = len(line) / max(1, line.pp_degree) < _TYPICAL_WIDTH / 6
    renderer = figure.hbar(
        y="rank",
        left="left",
        right="right",
        height=BAR_HEIGHT,
        fill_color={"field": "kind", "transform": mapper},
        line_width=1 if roomy else 0,
        source=ColumnDataSource(columns, name="drawn"),
        name="bars",
    )
    renderer.nonselection_glyph = None
    colours.paint(renderer.glyph, line_color="background")
    return renderer


def _labels(figure: Any) -> None:
    """Microbatch numbers; which of them have room depends on the zoom, so the script fills them in."""
    empty: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "ink": []}
    figure.text(
        x="x",
        y="y",
        text="text",
        text_color="ink",
        text_align="center",
        text_baseline="middle",
        text_font=value(FONT),
        text_font_size="11px",
        source=ColumnDataSource(empty, name="labels"),
        name="microbatches",
    )


def _packed(line: Timeline) -> ColumnDataSource:
    narrow = np.uint16 if line.microbatch.max(initial=0) < 2**16 else np.int32
    return ColumnDataSource(
        {
            "start": line.start,
            "letter": line.letter.astype(np.uint8),
            "chunk": line.chunk.astype(np.uint8),
            "microbatch": line.microbatch.astype(narrow),
        },
        name="packed",
    )


def _facts(plan: Plan, line: Timeline) -> dict[str, Any]:
    return {
        "offset": line.offset.tolist(),
        "stages": [list(stages) for stages in plan.problem.placement.stages_of],
        "durations": plan.problem.arrays.duration.tolist(),
        "letters": LETTERS,
        "names": [palette.NAMES[letter] for letter in LETTERS],
        "inks": list(palette.KIND_INKS),
        "fills": list(palette.KIND_FILLS),
        "shades": palette.PALETTE_SHADES,
        "max_glyphs": MAX_GLYPHS,
    }


def _overview(line: Timeline, x_range: Range1d, colours: Colours) -> Any:
    p, end = line.pp_degree, line.makespan or 1.0
    figure = time_figure(
        colours,
        height=58,
        x_range=Range1d(start=x_range.start, end=x_range.end),
        tools=[],
        y_range=Range1d(start=p - 0.5, end=-0.5),
        toolbar_location=None,
        name="overview",
    )
    figure.axis.visible = False
    figure.grid.visible = False
    source = ColumnDataSource({"image": [image(line, OVERVIEW_COLUMNS)]})
    figure.add_glyph(source, ImageRGBA(image="image", x=0, y=-0.5, dw=end, dh=p))
    tool = RangeTool(x_range=x_range)
    tool.overlay = BoxAnnotation(
        fill_color="#7f8ea8",
        fill_alpha=0.45,
        inverted=True,
        line_color="#7f8ea8",
        line_alpha=1.0,
        line_width=1.5,
        editable=True,
        left=x_range.start,
        right=x_range.end,
    )
    figure.add_tools(tool)
    return figure
