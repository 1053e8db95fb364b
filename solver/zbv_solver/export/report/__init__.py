"""The page of a plan: the same content in the service and in the file that opens from disk.

:func:`plan_view` turns a plan into texts and numbers, ``templates/plan_body.html.j2`` lays them out, and
``static/`` holds the base style and the modules that draw schedules. Everything else that a browser loads
belongs to the service's pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from zbv_solver.export import palette, quantities
from zbv_solver.export.report.figures import (
    Card,
    Compared,
    RankBars,
    ScheduleRow,
    cards_of,
    facts_of,
    idle_bars,
    memory_bars,
    schedule_rows,
)
from zbv_solver.export.report.sections import (
    LayersView,
    MicrobatchesView,
    RankLine,
    SimulationView,
    action_lists,
    layers_view,
    microbatches_view,
    simulation_view,
)
from zbv_solver.export.timeline import (
    MAX_GLYPHS,
    accounts_for_memory,
    idle_shares,
    shows_memory,
    timeline,
    timeline_facts,
)
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, Units

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "CHART_MODULES",
    "MODULES",
    "STATIC",
    "Card",
    "Compared",
    "GanttCanvas",
    "PageLink",
    "PlanView",
    "ScheduleRow",
    "environment",
    "gantt_canvas",
    "legend_of",
    "plan_view",
    "schedule_rows",
    "script_json",
]

STATIC: Path = Path(__file__).parent / "static"
_TEMPLATES: Path = Path(__file__).parent / "templates"

MODULES: tuple[str, ...] = (
    "dom.js",
    "numbers.js",
    "copies.js",
    "timeline.js",
    "words.js",
    "tooltip.js",
    "raster.js",
    "range.js",
    "surface.js",
    "gantt.js",
    "gestures.js",
    "memory.js",
    "overview.js",
    "chart.js",
    "inspector.js",
    "plan.js",
)
"""The modules of a plan's page in ``static/``. Each imports only modules before it; the last one starts."""
CHART_MODULES: tuple[str, ...] = MODULES[: MODULES.index("chart.js") + 1]
"""The modules that draw schedules on any page."""

_MEMORY_HEIGHT = 190
_OVERVIEW_HEIGHT = 52
_ALL_ROWS, _HIGHEST_ROW, _LOWEST_ROW = 640.0, 34.0, 7.0
_ROOM_FOR_TITLE, _ROOM_FOR_AXIS, _ROOM_WITHOUT_AXIS = 22, 42, 8
"""Heights in a chart, in pixels."""


@dataclass(frozen=True)
class PageLink:
    """A link from a plan to a page or a file; ``note`` describes it."""

    label: str
    url: str
    note: str


@dataclass(frozen=True)
class GanttCanvas:
    """A canvas that reserves its height in the page; all lengths in pixels."""

    rows: int
    """Height of the rows of all ranks together."""
    top: int
    bottom: int
    """Room above the rows for the title, and below them for the time axis."""
    title: str
    axis: str | None
    """The title of the time axis; None for a chart above another one that has the axis."""
    idle: str
    """The idle share of every rank, shown at the right of its row; separated by spaces."""

    @property
    def height(self) -> int:
        """Height of the whole canvas."""
        return self.top + self.rows + self.bottom


@dataclass(frozen=True)
class PlanView:
    """The content of a plan's page."""

    plan_id: str
    title: str
    subtitle: str
    cards: tuple[Card, ...]
    legend: tuple[tuple[str, str], ...]
    """Letter and name of every kind of action in the plan."""
    shades: str
    """The meaning of dark and light; empty with a single chunk."""
    per_rank: tuple[RankBars, ...]
    canvas: GanttCanvas
    has_bars: bool
    has_memory: bool
    has_copies: bool
    """Whether some activations are on the host for a time."""
    is_limited: bool
    """Whether the problem limits memory."""
    example: str
    baselines: tuple[ScheduleRow, ...]
    objective: str
    time_unit: str
    ranks: tuple[RankLine, ...]
    facts: tuple[tuple[str, str], ...]
    timeline: Markup
    """JSON for the script; see :func:`~zbv_solver.export.timeline.timeline_facts`."""
    layers: LayersView | None = None
    """The cut of the model; None if the problem gives stages."""
    microbatches: MicrobatchesView | None = None
    """Their sizes in the order of entry; None if they are equal."""
    simulation: SimulationView | None = None
    """The plan and the classical schedules when durations vary; None for very large plans."""
    exports: tuple[PageLink, ...] = ()
    links: tuple[PageLink, ...] = ()
    frontier_url: str | None = None
    json_url: str | None = None
    """Addresses; these four are set on a page of the service."""
    actions_url: str | None = None
    data: str | None = None
    """The address of :func:`~zbv_solver.export.timeline.timeline_bytes`, or the bytes in Base64."""


def environment(*directories: Path) -> Environment:
    """Jinja2 with the templates of these directories and those of a plan's page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader([*directories, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(
        memory_height=_MEMORY_HEIGHT,
        overview_height=_OVERVIEW_HEIGHT,
        plan_modules=MODULES,
        chart_modules=CHART_MODULES,
    )
    found.filters.update(
        time=lambda value, unit: quantities.time(value, Units(time=unit)),
        memory=quantities.memory,
        figure=quantities.figure,
        percent=quantities.percent,
    )
    return found


def plan_view(plan: Plan) -> PlanView:
    """The content of a plan's page, without links and without the actions that its script draws."""
    problem, orders, metrics = plan.problem, plan.orders, plan.metrics
    line = timeline(plan)
    has_memory = accounts_for_memory(problem)
    unit = quantities.time_unit(problem.units)
    return PlanView(
        plan_id=plan.plan_id,
        title=f"{quantities.counted(problem.pp_degree, 'rank')} × "
        f"{quantities.counted(problem.microbatches, 'microbatch')}",
        subtitle=_subtitle(plan),
        cards=tuple(cards_of(plan)),
        legend=legend_of(np.unique(orders.letter).tolist()),
        shades=_shades(problem.placement.chunks),
        per_rank=(idle_bars(plan), *([memory_bars(plan)] if has_memory else [])),
        canvas=gantt_canvas(problem.pp_degree, axis=quantities.titled("time", unit), idle=idle_shares(plan)),
        has_bars=len(orders) <= MAX_GLYPHS,
        has_memory=shows_memory(line, problem),
        has_copies=line.copies is not None,
        is_limited=problem.memory.limit is not None,
        example=orders.text_at(len(orders) // 2),
        baselines=schedule_rows(
            plan,
            [
                Compared("this plan", metrics, problem.units, fits=True),
                *(Compared(each.name, each, problem.units, each.fits) for each in plan.baselines),
            ],
        ),
        objective=problem.objective,
        time_unit=unit,
        ranks=tuple(action_lists(plan)),
        facts=tuple(facts_of(plan)),
        timeline=script_json(timeline_facts(line, problem)),
        layers=layers_view(plan),
        microbatches=microbatches_view(plan),
        simulation=simulation_view(plan),
    )


def gantt_canvas(
    ranks: int,
    *,
    title: str = "",
    axis: str | None = None,
    idle: Sequence[float] = (),
    rows: float = _ALL_ROWS,
) -> GanttCanvas:
    """The canvas for a number of ranks; all rows together take about ``rows`` pixels.

    Few ranks take less, so that rows are not too high; many take more, so that a pointer can hit each.
    """
    return GanttCanvas(
        rows=round(min(_HIGHEST_ROW, max(_LOWEST_ROW, rows / ranks)) * ranks),
        top=_ROOM_FOR_TITLE,
        bottom=_ROOM_WITHOUT_AXIS if axis is None else _ROOM_FOR_AXIS,
        title=title,
        axis=axis,
        idle=" ".join(quantities.percent(share, 1) for share in idle),
    )


def legend_of(codes: Iterable[int]) -> tuple[tuple[str, str], ...]:
    """Letters and their names."""
    return tuple((LETTERS[code], palette.NAMES[LETTERS[code]]) for code in codes)


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _shades(chunks: int) -> str:
    if chunks <= palette.PALETTE_SHADES:
        return "dark: chunk 0, light: chunk 1" if chunks > 1 else ""
    return "dark: even chunks, light: odd ones"


def _subtitle(plan: Plan) -> str:
    placement = {"v": "V placement", "loop": "looped placement", "single": "one stage per rank"}
    return (
        f"{placement[plan.problem.placement.kind]}, {plan.problem.n_stages} stages, "
        f"{quantities.figure(len(plan.orders), 12)} actions, optimised for {plan.problem.objective}"
    )
