"""Memory of every rank over time, as a Bokeh figure that shares its time axis with the Gantt chart.

The script (``static/memory.js``) fills its lines for what is in view.
"""

from __future__ import annotations

from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d, Step, VAreaStep
from bokeh.models.annotations import BoxAnnotation, Legend, LegendItem, Span

from zbv_solver.export import palette, quantities
from zbv_solver.export.bokeh_parts import FONT, Colours, layer, navigation, time_figure, tooltip
from zbv_solver.export.dimensions import MEMORY_HEIGHT
from zbv_solver.plans.plan import Plan

MAX_LINES = 16
"""Above this many ranks the memory lines are drawn as one band."""
_MUTED = 0.08
"""Opacity of what was muted by a click on the legend."""


def memory_figure(plan: Plan, x_range: Range1d, colours: Colours) -> Any:
    """What every rank holds at every time, and the limits as dashed lines."""
    top, ranks = _top(plan), plan.problem.pp_degree
    scale, unit = quantities.memory_scale(top, plan.problem.units)
    tools = navigation()
    figure = time_figure(
        colours,
        height=MEMORY_HEIGHT,
        x_range=x_range,
        tools=tools,
        y_range=Range1d(start=0, end=1.08 * top / scale or 1.0),
        toolbar_location=None,
        name="memory",
    )
    figure.toolbar.active_drag, figure.toolbar.active_scroll = tools[0], tools[2]
    figure.yaxis.axis_label = quantities.titled("memory", unit)
    figure.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    chosen = BoxAnnotation(
        left=0, right=0, visible=False, fill_alpha=0.12, line_color=None, name="memory:chosen"
    )
    colours.paint(chosen, fill_color="text")
    figure.add_layout(chosen)
    items = _lines(figure, ranks) if ranks <= MAX_LINES else _band(figure, plan)
    renderers = [renderer for item in items for renderer in item.renderers]
    _legend(figure, items, colours)
    _hover(figure, [each for each in renderers if each.name != "memory:all"], plan, unit)
    for limit in sorted(set(plan.problem.memory.limit or ()))[:MAX_LINES]:
        span = Span(
            location=limit / scale, dimension="width", line_dash="dashed", line_width=1.5, name="limit"
        )
        colours.paint(span, line_color="limit")
        figure.add_layout(span)
    # What the script divides amounts by.
    figure.tags = [scale]
    return figure


def _lines(figure: Any, ranks: int) -> list[LegendItem]:
    """A line for every rank."""
    items = []
    for rank in range(ranks):
        renderer = _line(figure, f"memory:{rank}", palette.LINES[rank % len(palette.LINES)])
        # Colours repeat after some ranks: dashes tell those apart.
        renderer.glyph.line_dash = "solid" if rank < len(palette.LINES) else "dotted"
        items.append(LegendItem(label=f"rank {rank}", renderers=[renderer]))
    return items


def _band(figure: Any, plan: Plan) -> list[LegendItem]:
    """Least and most loaded rank at every time, and a line for one rank: the one with the highest peak."""
    # Bokeh paints an area without any point for ever.
    source = ColumnDataSource({"at": [0.0], "low": [0.0], "high": [0.0]}, name="memory:band")
    drawn, faint = (
        VAreaStep(
            x="at", y1="low", y2="high", step_mode="after", fill_alpha=alpha, fill_color=palette.LINES[0]
        )
        for alpha in (0.3, _MUTED)
    )
    band = layer(figure, drawn, source, "memory:all", muted_glyph=faint)
    peaks = plan.metrics.peak_memory
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    line = _line(figure, "memory:one", palette.LINES[1])
    line.tags = [worst]
    return [
        LegendItem(label="all ranks, least to most", renderers=[band]),
        LegendItem(label=f"rank {worst}, the highest peak", renderers=[line], name="memory:one-label"),
    ]


def _line(figure: Any, name: str, colour: str) -> Any:
    source = ColumnDataSource({"at": [], "held": []}, name=name)
    drawn, faint = (
        Step(x="at", y="held", mode="after", line_width=1.6, line_color=colour, line_alpha=alpha)
        for alpha in (1.0, _MUTED)
    )
    return layer(figure, drawn, source, f"{name}-line", muted_glyph=faint)


def _hover(figure: Any, renderers: list[Any], plan: Plan, memory_unit: str) -> None:
    unit = quantities.time_unit(plan.problem.units)
    says = tooltip(
        "memory",
        ("from", f"@at{{0,0.[000]}} {unit}"),
        ("held", f"@held{{0,0.[00]}} {memory_unit}"),
    )
    figure.add_tools(HoverTool(tooltips=says, renderers=renderers, line_policy="prev"))


def _top(plan: Plan) -> float:
    """The highest peak, or limit unless it is so far above that it would flatten the lines."""
    peak, limits = max(plan.metrics.peak_memory, default=0.0), plan.problem.memory.limit
    return max(peak, *limits) if limits and max(limits) <= 3 * (peak or 1.0) else peak


def _legend(figure: Any, items: list[LegendItem], colours: Colours) -> None:
    legend = Legend(
        items=items,
        name="legend",
        orientation="horizontal",
        click_policy="mute",
        ncols=8,
        label_text_font=FONT,
        label_text_font_size="12px",
        border_line_color=None,
        padding=2,
        margin=2,
        glyph_width=16,
        spacing=8,
    )
    colours.paint(legend, label_text_color="muted", background_fill_color="surface")
    figure.add_layout(legend, "above")
