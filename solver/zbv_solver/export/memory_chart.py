"""Memory of every rank over time, as a Bokeh figure that shares its time axis with the Gantt chart."""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Legend, LegendItem, Span
from numpy.typing import NDArray

from zbv_solver.export import palette, quantities
from zbv_solver.export.bokeh_parts import FONT, Colours, navigation, time_figure, tooltip
from zbv_solver.export.timeline import Timeline
from zbv_solver.plan import Plan
from zbv_solver.problem import Problem

FloatArray = NDArray[np.float64]

MAX_LINES = 16
"""Above this many ranks the memory lines are drawn as one band."""
MAX_STEPS = 60_000
"""Points of all lines together, above which they show the peak of every time column instead of every step."""
COLUMNS = 1500
"""Time columns of a plan that is too large for exact steps."""


def accounts_for_memory(problem: Problem) -> bool:
    """Whether the problem says anything about memory."""
    memory = problem.memory
    return memory.limit is not None or any(memory.forward) or any(memory.static)


def memory_figure(plan: Plan, line: Timeline, x_range: Range1d, colours: Colours) -> Any:
    """What every rank holds at every time, and the limits as dashed lines."""
    limits = plan.problem.memory.limit
    top = _top(plan)
    scale, unit = quantities.memory_scale(top, plan.problem.units)
    tools = navigation()
    figure = time_figure(
        colours,
        height=210,
        x_range=x_range,
        tools=tools,
        y_range=Range1d(start=0, end=1.08 * top / scale or 1.0),
        toolbar_location=None,
        name="memory",
    )
    figure.toolbar.active_drag, figure.toolbar.active_scroll = tools[0], tools[2]
    figure.yaxis.axis_label = quantities.titled("memory", unit)
    figure.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    if line.pp_degree <= MAX_LINES:
        _lines(figure, plan, line, colours)
    else:
        _band(figure, plan, line, colours)
    for limit in sorted(set(limits or ()))[:MAX_LINES]:
        span = Span(
            location=limit / scale, dimension="width", line_dash="dashed", line_width=1.5, name="limit"
        )
        colours.paint(span, line_color="limit")
        figure.add_layout(span)
    return figure


def _lines(figure: Any, plan: Plan, line: Timeline, colours: Colours) -> None:
    items, renderers = [], []
    scale, memory_unit = quantities.memory_scale(_top(plan), plan.problem.units)
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
            source=ColumnDataSource({"at": at, "held": held / scale}),
            name=f"memory of rank {rank}",
        )
        items.append(LegendItem(label=f"rank {rank}", renderers=[renderer]))
        renderers.append(renderer)
    _legend(figure, items, colours)
    unit = quantities.time_unit(plan.problem.units)
    says = tooltip(
        "<b>$name</b>",
        ("from", f"@at{{0,0.[000]}} {unit}"),
        ("held", f"@held{{0,0.[00]}} {memory_unit}"),
    )
    figure.add_tools(HoverTool(tooltips=says, renderers=renderers, line_policy="prev"))


def _band(figure: Any, plan: Plan, line: Timeline, colours: Colours) -> None:
    """Least and most loaded rank at every time, and the rank with the highest peak as a line."""
    edges = np.linspace(0.0, line.makespan, COLUMNS + 1)
    scale, _ = quantities.memory_scale(_top(plan), plan.problem.units)
    held = np.stack([peaks_between(plan, line, rank, edges) for rank in range(line.pp_degree)]) / scale
    source = ColumnDataSource({"at": edges[:-1], "low": held.min(axis=0), "high": held.max(axis=0)})
    band = figure.varea_step(
        x="at",
        y1="low",
        y2="high",
        step_mode="after",
        fill_alpha=0.3,
        fill_color=palette.LINES[0],
        source=source,
    )
    worst = int(np.argmax(plan.metrics.peak_memory))
    peak = figure.step(
        x=edges[:-1], y=held[worst], mode="after", line_width=1.5, line_color=palette.LINES[1], name="peak"
    )
    items = [
        LegendItem(label="all ranks, least to most", renderers=[band]),
        LegendItem(label=f"rank {worst}, the highest peak", renderers=[peak]),
    ]
    _legend(figure, items, colours)


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


def _steps(plan: Plan, line: Timeline, rank: int) -> tuple[FloatArray, FloatArray]:
    """Times at which a rank's memory changes, and what it holds from then on."""
    if 2 * len(line) > MAX_STEPS:
        edges = np.linspace(0.0, line.makespan, COLUMNS + 1)
        return edges[:-1], peaks_between(plan, line, rank, edges)
    at, held = memory_steps(plan, line, rank)
    changes = np.concatenate(([True], np.diff(held) != 0))
    changes[-1] = True
    return at[changes], held[changes]


def memory_steps(plan: Plan, line: Timeline, rank: int) -> tuple[FloatArray, FloatArray]:
    """Every start and end of a rank's actions, and what the rank holds from then on; starts with static."""
    part = line.slice_of(rank)
    at = np.stack([line.start[part], line.end[part]], axis=1).ravel()
    held = np.stack([line.during[part], line.after[part]], axis=1).ravel()
    static = plan.problem.memory.static[rank]
    last = held[-1] if len(held) else static
    return np.concatenate(([0.0], at, [line.makespan])), np.concatenate(([static], held, [last]))


def peaks_between(plan: Plan, line: Timeline, rank: int, edges: FloatArray) -> FloatArray:
    """The most that a rank holds between every two consecutive edges."""
    at, held = memory_steps(plan, line, rank)
    first = np.searchsorted(at, edges[:-1], side="right") - 1
    stop = np.searchsorted(at, edges[1:], side="left")
    bounds = np.stack([first, np.maximum(stop, first + 1)], axis=1).ravel()
    return np.maximum.reduceat(np.append(held, held[-1]), bounds)[::2]
