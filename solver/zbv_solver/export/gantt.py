"""The interactive picture of a plan: Gantt chart, memory lines and an overview, as a Bokeh layout.

Colours that differ between light and dark are listed by :class:`Colours` while the layout is built, so that
the page's script can change them in the browser. Labels and, in large plans, the actions of the visible
window are put in by that script too; the layout alone shows everything else.

Nothing here uses Bokeh's CustomJS: it needs ``eval``, which the pages' content security policy forbids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.layouts import column
from bokeh.models import (
    BoxAnnotation,
    BoxZoomTool,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    ImageRGBA,
    LayoutDOM,
    Legend,
    LegendItem,
    LinearColorMapper,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    RangeTool,
    ResetTool,
    SaveTool,
    Span,
    WheelZoomTool,
)
from bokeh.plotting import figure as bokeh_figure

from zbv_solver.export import palette, quantities
from zbv_solver.export.raster import image
from zbv_solver.export.timeline import Timeline, timeline
from zbv_solver.plan import Plan
from zbv_solver.problem import LETTERS, Problem

MAX_GLYPHS = 10_000
"""Above this many actions a picture of the whole is drawn, and glyphs only for what is zoomed into."""

IMAGE_COLUMNS = 2400
OVERVIEW_COLUMNS = 1200
MAX_LINES = 16
"""Above this many ranks the memory lines are drawn as one band."""
MAX_STEPS = 3000
"""Points of a memory line above which only the peak of every time column is drawn."""

BAR_HEIGHT = 0.84
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_LEFT_BORDER = 66
_TYPICAL_WIDTH = 1000


@dataclass
class Colours:
    """Sets colours of models for one theme and keeps a record of both, for the script that switches."""

    dark: bool
    rules: list[dict[str, str]] = field(default_factory=list)

    def paint(self, model: Any, **properties: str) -> None:
        """Give properties of a model the theme's colours: ``paint(figure, background_fill_color="background")``."""
        for name, role in properties.items():
            light, dark = getattr(palette.LIGHT, role), getattr(palette.DARK, role)
            setattr(model, name, dark if self.dark else light)
            self.rules.append({"model": model.id, "property": name, "light": light, "dark": dark})


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
        figures.append(_memory(plan, line, x_range, colours))
    figures.append(_overview(line, x_range, colours))
    layout = column(*figures, sizing_mode="stretch_width", spacing=2)
    return Chart(layout, colours.rules, len(line) <= MAX_GLYPHS)


def accounts_for_memory(problem: Problem) -> bool:
    """Whether the problem says anything about memory."""
    memory = problem.memory
    return memory.limit is not None or any(memory.forward) or any(memory.static)


def _x_range(line: Timeline) -> Range1d:
    end = line.makespan or 1.0
    margin = 0.012 * end
    shortest = float((line.end - line.start).max(initial=0.0)) or end
    return Range1d(
        -margin, end + margin, bounds=(-margin, end + margin), min_interval=min(end, shortest / 4), name="time"
    )


def _figure(colours: Colours, *, height: int, x_range: Range1d, tools: list[Any], **options: Any) -> Any:
    figure = bokeh_figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=x_range,
        tools=tools,
        min_border_left=_LEFT_BORDER,
        min_border_right=14,
        **options,
    )
    figure.toolbar.logo = None
    colours.paint(
        figure,
        background_fill_color="background",
        border_fill_color="surface",
        outline_line_color="grid",
    )
    for axis in figure.axis:
        axis.major_label_text_font = axis.axis_label_text_font = _FONT
        axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
        axis.axis_line_color = None
        colours.paint(
            axis,
            major_label_text_color="muted",
            axis_label_text_color="muted",
            major_tick_line_color="grid",
        )
    for grid in figure.grid:
        colours.paint(grid, grid_line_color="grid")
    figure.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    return figure


def _navigation() -> list[Any]:
    # Without the modifier a wheel that scrolls the page would get stuck in the chart.
    return [
        BoxZoomTool(dimensions="width"),
        PanTool(dimensions="width"),
        WheelZoomTool(dimensions="width", modifiers="ctrl"),
        ResetTool(),
        SaveTool(),
    ]


def _gantt(plan: Plan, line: Timeline, x_range: Range1d, colours: Colours) -> Any:
    p, units = line.pp_degree, plan.problem.units
    row = min(34.0, max(7.0, 640 / p))
    hover = HoverTool(tooltips=_tooltips(units.time or ""), renderers=[], point_policy="follow_mouse")
    tools = [*_navigation(), hover]
    figure = _figure(
        colours,
        height=round(row * p) + 88,
        x_range=x_range,
        tools=tools,
        y_range=Range1d(p - 0.5, -0.5),
        toolbar_location="above",
        name="gantt",
    )
    figure.toolbar.active_drag, figure.toolbar.active_scroll = tools[0], tools[2]
    every = max(1, int(np.ceil(14 / row)))
    figure.yaxis.ticker = FixedTicker(ticks=list(range(0, p, every)))
    figure.yaxis.major_label_overrides = {rank: f"rank {rank}" for rank in range(p)}
    figure.ygrid.visible = False
    figure.xaxis.axis_label = f"time [{units.time}]" if units.time else "time"
    _picture(figure, line, IMAGE_COLUMNS, visible=len(line) > MAX_GLYPHS, name="picture")
    _separators(figure, p, row, colours, visible=len(line) > MAX_GLYPHS)
    bars = _bars(figure, line, colours)
    hover.renderers = [bars]
    _labels(figure)
    # The script draws from this when only a part is visible; Bokeh carries it as packed binary.
    figure.tags = [_packed(line), _facts(plan, line)]
    return figure


def _tooltips(unit: str) -> str:
    rows = (
        ("start", f"@left{{0,0.[000]}} {unit}"),
        ("end", f"@right{{0,0.[000]}} {unit}"),
        ("rank", "@rank"),
        ("stage", "@stage (chunk @chunk)"),
        ("microbatch", "@microbatch"),
    )
    body = "".join(f"<dt>{term}</dt><dd>{value}</dd>" for term, value in rows)
    style = (
        "<style>dl{margin:4px 0 0;display:grid;grid-template-columns:auto auto;gap:1px 10px}"
        "dt{opacity:.75}dd{margin:0;text-align:right;font-variant-numeric:tabular-nums}</style>"
    )
    return f"{style}<b>@action</b> @name<dl>{body}</dl>"


def _picture(figure: Any, line: Timeline, columns: int, *, visible: bool, name: str) -> None:
    if not visible:
        return
    p = line.pp_degree
    # Rows of an image count upwards from y; the axis runs downwards, so rank 0 stays the first row.
    source = ColumnDataSource({"image": [image(line, columns)]})
    glyph = ImageRGBA(image="image", x=0, y=-0.5, dw=line.makespan or 1.0, dh=p)
    figure.add_glyph(source, glyph, name=name, level="underlay")


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
        text_font=value(_FONT),
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
        "shades": palette.PALETTE_SHADES,
        "max_glyphs": MAX_GLYPHS,
    }


def _memory(plan: Plan, line: Timeline, x_range: Range1d, colours: Colours) -> Any:
    limits = plan.problem.memory.limit
    top = max(plan.metrics.peak_memory, default=0.0)
    top = max(top, *limits) if limits and max(limits) <= 3 * (top or 1.0) else top
    tools = _navigation()
    figure = _figure(
        colours,
        height=210,
        x_range=x_range,
        tools=tools,
        y_range=Range1d(0, 1.08 * top or 1.0),
        toolbar_location=None,
        name="memory",
    )
    figure.toolbar.active_drag, figure.toolbar.active_scroll = tools[0], tools[2]
    unit = plan.problem.units.memory
    figure.yaxis.axis_label = f"memory [{unit}]" if unit else "memory"
    figure.yaxis.formatter = NumeralTickFormatter(format="0.[0] b" if unit == "bytes" else "0,0.[00]")
    if line.pp_degree <= MAX_LINES:
        _memory_lines(figure, plan, line, colours)
    else:
        _memory_band(figure, plan, line, colours)
    for limit in sorted(set(limits or ()))[:MAX_LINES]:
        span = Span(location=limit, dimension="width", line_dash="dashed", line_width=1.5, name="limit")
        colours.paint(span, line_color="limit")
        figure.add_layout(span)
    return figure


def _memory_lines(figure: Any, plan: Plan, line: Timeline, colours: Colours) -> None:
    items, renderers = [], []
    for rank in range(line.pp_degree):
        at, held = _steps(plan, line, rank)
        renderer = figure.step(
            x="at",
            y="held",
            mode="after",
            line_width=1.6,
            line_color=palette.LINES[rank % len(palette.LINES)],
            # Colours repeat after some ranks: dashes tell those apart.
            line_dash="solid" if rank < len(palette.LINES) else "dotted",
            muted_alpha=0.08,
            source=ColumnDataSource({"at": at, "held": held}),
            name=f"memory of rank {rank}",
        )
        items.append(LegendItem(label=f"rank {rank}", renderers=[renderer]))
        renderers.append(renderer)
    legend = Legend(
        items=items,
        orientation="horizontal",
        click_policy="mute",
        ncols=8,
        label_text_font=_FONT,
        label_text_font_size="12px",
        border_line_color=None,
        padding=2,
        margin=2,
        glyph_width=16,
        spacing=8,
    )
    colours.paint(legend, label_text_color="muted", background_fill_color="surface")
    figure.add_layout(legend, "above")
    unit = plan.problem.units
    tooltips = [("", "$name"), ("time", f"@at{{0,0.[000]}} {unit.time or ''}"), ("held", "@held{0,0.[00]}")]
    figure.add_tools(HoverTool(tooltips=tooltips, renderers=renderers, line_policy="prev"))


def _memory_band(figure: Any, plan: Plan, line: Timeline, colours: Colours) -> None:
    """Least and most loaded rank at every time, and the rank with the highest peak as a line."""
    edges = np.linspace(0.0, line.makespan, MAX_STEPS // 2 + 1)
    held = np.stack([_peaks_between(plan, line, rank, edges) for rank in range(line.pp_degree)])
    source = ColumnDataSource({"at": edges[:-1], "low": held.min(axis=0), "high": held.max(axis=0)})
    band = figure.varea_step(
        x="at", y1="low", y2="high", step_mode="after", fill_alpha=0.3, fill_color=palette.LINES[0], source=source
    )
    worst = int(np.argmax(plan.metrics.peak_memory))
    peak = figure.step(
        x=edges[:-1], y=held[worst], mode="after", line_width=1.5, line_color=palette.LINES[1], name="peak"
    )
    items = [
        LegendItem(label="all ranks, least to most", renderers=[band]),
        LegendItem(label=f"rank {worst}, the highest peak", renderers=[peak]),
    ]
    legend = Legend(
        items=items,
        orientation="horizontal",
        label_text_font=_FONT,
        label_text_font_size="12px",
        border_line_color=None,
        padding=2,
        margin=2,
        glyph_width=16,
        spacing=8,
    )
    colours.paint(legend, label_text_color="muted", background_fill_color="surface")
    figure.add_layout(legend, "above")


def _steps(plan: Plan, line: Timeline, rank: int) -> tuple[Any, Any]:
    """Times at which a rank's memory changes, and what it holds from then on."""
    part = line.slice_of(rank)
    if 2 * (part.stop - part.start) > MAX_STEPS:
        edges = np.linspace(0.0, line.makespan, MAX_STEPS // 2 + 1)
        return edges[:-1], _peaks_between(plan, line, rank, edges)
    at, held = _all_steps(plan, line, rank)
    changes = np.concatenate(([True], np.diff(held) != 0))
    changes[-1] = True
    return at[changes], held[changes]


def _all_steps(plan: Plan, line: Timeline, rank: int) -> tuple[Any, Any]:
    part = line.slice_of(rank)
    at = np.stack([line.start[part], line.end[part]], axis=1).ravel()
    held = np.stack([line.during[part], line.after[part]], axis=1).ravel()
    static = plan.problem.memory.static[rank]
    last = held[-1] if len(held) else static
    return np.concatenate(([0.0], at, [line.makespan])), np.concatenate(([static], held, [last]))


def _peaks_between(plan: Plan, line: Timeline, rank: int, edges: Any) -> Any:
    """The most that a rank holds between every two consecutive edges."""
    at, held = _all_steps(plan, line, rank)
    first = np.searchsorted(at, edges[:-1], side="right") - 1
    stop = np.searchsorted(at, edges[1:], side="left")
    bounds = np.stack([first, np.maximum(stop, first + 1)], axis=1).ravel()
    return np.maximum.reduceat(np.append(held, held[-1]), bounds)[::2]


def _overview(line: Timeline, x_range: Range1d, colours: Colours) -> Any:
    p, end = line.pp_degree, line.makespan or 1.0
    figure = _figure(
        colours,
        height=58,
        x_range=Range1d(x_range.start, x_range.end),
        tools=[],
        y_range=Range1d(p - 0.5, -0.5),
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
