"""A Gantt chart as a Bokeh figure: axes, and layers that ``static/gantt.js`` fills for what is in view.

A figure has a name, and its layers are named after it, so that a page has as many as it likes::

    colours = Colours()
    x_range = time_range(planned, measured)
    figures = [gantt_figure(line, x_range, colours, name=name, unit="µs") for name, line in lines.items()]

Nothing here uses Bokeh's CustomJS: it needs ``eval``, which the pages' content security policy forbids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    HBar,
    HSpan,
    ImageRGBA,
    Line,
    LinearAxis,
    LinearColorMapper,
    Range1d,
    RangeTool,
    Text,
)
from bokeh.models.annotations import BoxAnnotation

from zbv_solver.export import palette, quantities
from zbv_solver.export.bokeh_parts import FONT, Colours, layer, navigation, time_figure
from zbv_solver.export.dimensions import ALL_ROWS, AXES_HEIGHT, OVERVIEW_HEIGHT, rows_height
from zbv_solver.export.timeline import Timeline
from zbv_solver.export.timeline_data import MAX_GLYPHS

BAR_HEIGHT = 0.84
_LABEL_HEIGHT = 14


def time_range(*lines: Timeline, name: str = "time") -> Range1d:
    """The time axis that figures of one or several timelines share; it shows all of it at first."""
    end = max((line.makespan for line in lines), default=0.0) or 1.0
    margin = 0.012 * end
    longest = max((float((line.end - line.start).max(initial=0.0)) for line in lines), default=0.0) or end
    return Range1d(
        start=-margin,
        end=end + margin,
        bounds=(-margin, end + margin),
        min_interval=min(end, longest / 8),
        name=name,
    )


def gantt_figure(
    line: Timeline,
    x_range: Range1d,
    colours: Colours,
    *,
    name: str = "gantt",
    unit: str = "",
    notes: list[str] | None = None,
    note: str = "",
    has_toolbar: bool = True,
    has_title: bool = True,
    height: float = ALL_ROWS,
) -> Any:
    """Axes and empty layers for one timeline.

    Parameters
    ----------
    name
        Of the figure; its layers are ``name:bars`` and so on.
    unit
        Of time, for the axis.
    notes, note
        A text for every rank, (p,), at the right of its row, and what these texts are.
    has_toolbar
        Of several figures on one axis the first is enough.
    has_title
        Whether the time axis says what it is.
    height
        Pixels for the rows of all ranks together; few ranks take less.
    """
    p = line.pp_degree
    rows = rows_height(p, height)
    row = rows / p
    tools = navigation()
    figure = time_figure(
        colours,
        height=rows + AXES_HEIGHT - (0 if has_toolbar else 30) - (0 if has_title else 20),
        x_range=x_range,
        tools=tools,
        y_range=Range1d(start=p - 0.5, end=-0.5),
        toolbar_location="above" if has_toolbar else None,
        name=name,
    )
    figure.toolbar.active_drag, figure.toolbar.active_scroll = tools[0], tools[2]
    every = max(1, int(np.ceil(_LABEL_HEIGHT / row)))
    ticks = list(range(0, p, every))
    figure.yaxis.ticker = FixedTicker(ticks=ticks)
    figure.yaxis.major_label_overrides = {rank: f"rank {rank}" for rank in range(p)}
    figure.ygrid.visible = False
    if has_title:
        figure.xaxis.axis_label = quantities.titled("time", unit)
    if notes is not None:
        _notes(figure, ticks, notes, note, colours)
    _layers(figure, p, row, colours, name, is_large=len(line) > MAX_GLYPHS)
    return figure


def overview_figure(line: Timeline, x_range: Range1d, colours: Colours, *, name: str = "overview") -> Any:
    """The whole of a timeline on a narrow strip, with the part that ``x_range`` shows marked and movable."""
    p = line.pp_degree
    figure = time_figure(
        colours,
        height=OVERVIEW_HEIGHT,
        x_range=Range1d(start=x_range.start, end=x_range.end),
        tools=[],
        y_range=Range1d(start=p - 0.5, end=-0.5),
        toolbar_location=None,
        name=name,
    )
    figure.axis.visible = False
    figure.grid.visible = False
    _picture(figure, p, name)
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


def _notes(figure: Any, ticks: list[int], notes: list[str], note: str, colours: Colours) -> None:
    """Texts at the right of the rows."""
    axis = LinearAxis(
        name=f"{figure.name}:notes",
        ticker=FixedTicker(ticks=ticks),
        major_label_overrides=dict(enumerate(notes)),
        major_label_text_font=FONT,
        major_label_text_font_size="12px",
        axis_label=note,
        axis_label_text_font=FONT,
        axis_label_text_font_size="12px",
        axis_label_text_font_style="normal",
        axis_label_standoff=4,
        major_label_standoff=4,
        axis_line_color=None,
        major_tick_line_color=None,
        minor_tick_line_color=None,
    )
    colours.paint(axis, major_label_text_color="muted", axis_label_text_color="muted")
    figure.add_layout(axis, "right")


def _layers(figure: Any, p: int, row: float, colours: Colours, name: str, *, is_large: bool) -> None:
    """What the script draws with, from the lowest to the highest."""
    # As the script will want it: each change later would lay everything out again.
    _picture(figure, p, name, is_shown=is_large)
    _separators(figure, p, row, colours, name, is_shown=is_large)
    _idle(figure, colours, name)
    bars = _bars(figure, name, "bars", "drawn", ("left", "right", "rank", "kind", "alpha"))
    bars.glyph.fill_alpha = "alpha"
    colours.paint(bars.glyph, line_color="background")
    marks = _bars(figure, name, "marks-bars", "marks", ("left", "right", "rank", "kind"))
    marks.glyph.line_width = 1
    colours.paint(marks.glyph, line_color="text")
    _path(figure, colours, name)
    _chosen(figure, colours, name)
    _labels(figure, name)


def _picture(figure: Any, p: int, name: str, *, is_shown: bool = True) -> None:
    # Rows of an image count upwards from y; the axis runs downwards, so rank 0 stays the first row.
    blank = np.zeros((1, 1), dtype=np.uint32)
    source = ColumnDataSource({"image": [blank], "x": [0.0], "dw": [1.0]}, name=f"{name}:pixels")
    glyph = ImageRGBA(image="image", x="x", y=-0.5, dw="dw", dh=p)
    renderer = layer(figure, glyph, source, f"{name}:picture")
    renderer.visible = is_shown


def _separators(figure: Any, p: int, row: float, colours: Colours, name: str, *, is_shown: bool) -> None:
    """Gaps between the ranks of the picture, which bars have by themselves."""
    source = ColumnDataSource({"y": [rank + 0.5 for rank in range(p - 1)]})
    glyph = HSpan(y="y", line_width=max(1.0, (1 - BAR_HEIGHT) * row))
    renderer = layer(figure, glyph, source, f"{name}:separators")
    renderer.visible = is_shown
    colours.paint(renderer.glyph, line_color="background")


def _idle(figure: Any, colours: Colours, name: str) -> None:
    glyph = HBar(
        y="rank",
        left="left",
        right="right",
        height=BAR_HEIGHT,
        line_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_scale=8,
        hatch_weight=1,
    )
    renderer = layer(figure, glyph, _source(name, "idle", ("left", "right", "rank")), f"{name}:idle-bars")
    colours.paint(renderer.glyph, fill_color="idle", hatch_color="muted")


def _bars(figure: Any, name: str, bars: str, source: str, columns: tuple[str, ...]) -> Any:
    """A bar per action."""
    mapper = LinearColorMapper(palette=palette.KIND_FILLS, low=-0.5, high=len(palette.KIND_FILLS) - 0.5)
    glyph = HBar(
        y="rank",
        left="left",
        right="right",
        height=BAR_HEIGHT,
        fill_color={"field": "kind", "transform": mapper},
    )
    return layer(figure, glyph, _source(name, source, columns), f"{name}:{bars}")


def _path(figure: Any, colours: Colours, name: str) -> None:
    """A critical path: a line under the actions it consists of, with a casing so that it shows on all."""
    source = _source(name, "path", ("x", "y"))
    for part, width, role in (("casing", 6.0, "background"), ("path-line", 2.5, "text")):
        glyph = Line(x="x", y="y", line_width=width, line_join="round")
        layer(figure, glyph, source, f"{name}:{part}")
        colours.paint(glyph, line_color=role)


def _chosen(figure: Any, colours: Colours, name: str) -> None:
    glyph = HBar(y="rank", left="left", right="right", height=1.0, fill_color=None, line_width=2.5)
    layer(figure, glyph, _source(name, "chosen", ("left", "right", "rank")), f"{name}:chosen-bar")
    colours.paint(glyph, line_color="text")


def _labels(figure: Any, name: str) -> None:
    """Microbatch numbers, where the zoom leaves room for them."""
    glyph = Text(
        x="x",
        y="y",
        text="text",
        text_color="ink",
        text_alpha="alpha",
        text_align="center",
        text_baseline="middle",
        text_font=value(FONT),
        text_font_size="11px",
    )
    source = _source(name, "labels", ("x", "y", "text", "ink", "alpha"))
    layer(figure, glyph, source, f"{name}:microbatches")


def _source(name: str, part: str, columns: tuple[str, ...]) -> ColumnDataSource:
    empty: dict[str, list[Any]] = {column: [] for column in columns}
    return ColumnDataSource(empty, name=f"{name}:{part}")
