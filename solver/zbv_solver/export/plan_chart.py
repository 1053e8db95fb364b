"""The interactive picture of a plan: Gantt chart, memory lines and an overview, linked, as a Bokeh layout.

Colours that differ between light and dark are listed by :class:`Colours` while the layout is built, so that
the page's script can change them in the browser. That script also puts in what is in view.
"""

from __future__ import annotations

from dataclasses import dataclass

from bokeh.layouts import column
from bokeh.models import LayoutDOM

from zbv_solver.export import quantities
from zbv_solver.export.bokeh_parts import Colours
from zbv_solver.export.dimensions import SPACING
from zbv_solver.export.gantt import gantt_figure, overview_figure, time_range
from zbv_solver.export.memory_chart import memory_figure
from zbv_solver.export.per_rank import accounts_for_memory, idle_shares
from zbv_solver.export.timeline import Timeline
from zbv_solver.plans.plan import Plan


@dataclass(frozen=True)
class Chart:
    """A layout and the rules by which its colours follow the theme."""

    layout: LayoutDOM
    rules: list[dict[str, str]]


def plan_chart(plan: Plan, line: Timeline) -> Chart:
    """Gantt chart of all ranks, memory lines and overview of a plan that was laid out in time."""
    colours = Colours()
    x_range = time_range(line)
    gantt = gantt_figure(
        line,
        x_range,
        colours,
        unit=quantities.time_unit(plan.problem.units),
        notes=[quantities.percent(share, 1) for share in idle_shares(plan)],
        note="idle",
    )
    figures = [gantt]
    if accounts_for_memory(plan.problem):
        figures.append(memory_figure(plan, x_range, colours))
    figures.append(overview_figure(line, x_range, colours))
    return Chart(column(*figures, sizing_mode="stretch_width", spacing=SPACING), colours.rules)
