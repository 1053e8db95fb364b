"""What the Bokeh figures share: fonts, borders, tools, and colours that follow the theme."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    Glyph,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.plotting import figure as bokeh_figure

from zbv_solver.export import palette

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
TICKS = 10
"""Of a time axis, where there is room: the script asks for fewer on narrow screens."""
_LEFT_BORDER = 66
RIGHT_BORDER = 74
"""Room for the numbers at the right of the rows."""


@dataclass
class Colours:
    """Sets colours of models for the light theme and keeps a record of both, for the script that switches."""

    rules: list[dict[str, str]] = field(default_factory=list)

    def paint(self, model: Any, **properties: str) -> None:
        """Give properties of a model colours of a theme: ``paint(axis, axis_label_text_color="muted")``."""
        for name, role in properties.items():
            light, dark = getattr(palette.LIGHT, role), getattr(palette.DARK, role)
            setattr(model, name, light)
            self.rules.append({"model": model.id, "property": name, "light": light, "dark": dark})


def time_figure(colours: Colours, *, height: int, x_range: Range1d, tools: list[Any], **options: Any) -> Any:
    """A figure over time in the pages' style; figures of one page have the same left border."""
    figure = bokeh_figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=x_range,
        tools=tools,
        min_border_left=_LEFT_BORDER,
        min_border_right=RIGHT_BORDER,
        **options,
    )
    figure.toolbar.logo = None
    # Bokeh takes its own width less 15 pixels for the room that tools have, and would hide the last.
    figure.toolbar.stylesheets = [":host { padding-right: 18px; --divider-color: var(--line, #dde2ea); }"]
    figure.border_line_color = None
    colours.paint(
        figure,
        background_fill_color="background",
        border_fill_color="surface",
        outline_line_color="grid",
    )
    for axis in figure.axis:
        axis.major_label_text_font = axis.axis_label_text_font = FONT
        axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
        axis.axis_line_color = None
        axis.major_tick_in = 0
        colours.paint(
            axis,
            major_label_text_color="muted",
            axis_label_text_color="muted",
            major_tick_line_color="grid",
        )
    for grid in figure.grid:
        colours.paint(grid, grid_line_color="grid")
    figure.xaxis.ticker.desired_num_ticks = TICKS
    figure.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    return figure


def layer(figure: Any, glyph: Glyph, source: ColumnDataSource, name: str, **options: Any) -> Any:
    """A renderer of a figure: ``figure.hbar(…)`` adds glyphs for selections, too, that nobody makes here."""
    unused: dict[str, Any] = {"selection_glyph": None, "nonselection_glyph": None}
    return figure.add_glyph(source, glyph, name=name, **unused, **options)


def navigation() -> list[Any]:
    """Tools that move through time; the first drags and the third scrolls."""
    # Without the modifier a wheel that scrolls the page would get stuck in the chart.
    return [
        BoxZoomTool(dimensions="width"),
        PanTool(dimensions="width"),
        WheelZoomTool(dimensions="width", modifiers="ctrl"),
        ResetTool(),
        SaveTool(),
    ]


def tooltip(head: str, *rows: tuple[str, str]) -> str:
    """HTML of a hover tool: a heading and a table of terms and values."""
    cells = "".join(
        f'<span style="color:var(--muted,{palette.LIGHT.muted})">{term}</span>'
        f'<span style="text-align:right;font-variant-numeric:tabular-nums">{value}</span>'
        for term, value in rows
    )
    # The page's custom properties reach into Bokeh's shadow roots; where there are none, the light theme's.
    box = (
        "margin:-6px;padding:9px 13px 10px;font:13px/1.5 system-ui,sans-serif;"
        f"background:var(--surface,{palette.LIGHT.surface});color:var(--text,{palette.LIGHT.text})"
    )
    grid = "display:grid;grid-template-columns:auto auto;gap:0 14px;margin-top:3px"
    return f'<div style="{box}">{head}<div style="{grid}">{cells}</div></div>'
