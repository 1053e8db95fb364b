"""The page of a plan: the same content in the service and in the file that opens from disk.

:func:`plan_view` turns a plan into texts and numbers, ``templates/plan_body.html.j2`` lays them out, and
``static/`` holds the base style and the modules that draw schedules. Everything else that a browser loads
belongs to the service's pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from zbv_solver.export import palette, quantities
from zbv_solver.export.per_rank import (
    RankBars,
    accounts_for_memory,
    idle_bars,
    idle_shares,
    memory_bars,
)
from zbv_solver.export.report.action_lists import RankLine, action_lists
from zbv_solver.export.report.canvas import (
    MEMORY_HEIGHT,
    OVERVIEW_HEIGHT,
    GanttCanvas,
    gantt_canvas,
)
from zbv_solver.export.report.figures import BaselineLine, Card, baselines_of, cards_of, facts_of
from zbv_solver.export.report.layers import LayersView, layers_view
from zbv_solver.export.timeline import timeline
from zbv_solver.export.timeline_data import MAX_GLYPHS, timeline_facts
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, Units

if TYPE_CHECKING:
    from jinja2 import FileSystemLoader

__all__ = [
    "CHART_MODULES",
    "FILTERS",
    "GLOBALS",
    "MODULES",
    "STATIC",
    "TEMPLATES",
    "BaselineLine",
    "Card",
    "ExportLink",
    "GanttCanvas",
    "PageLink",
    "PlanView",
    "gantt_canvas",
    "plan_view",
    "script_json",
    "template_loader",
]

STATIC: Path = Path(__file__).parent / "static"
TEMPLATES: Path = Path(__file__).parent / "templates"

MODULES: tuple[str, ...] = (
    "dom.js",
    "numbers.js",
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


@dataclass(frozen=True)
class ExportLink:
    """An export format and its address."""

    name: str
    url: str
    description: str


@dataclass(frozen=True)
class PageLink:
    """A link from a plan to a page or a file; ``note`` describes it."""

    label: str
    url: str
    note: str


@dataclass(frozen=True)
class PlanView:
    """The content of a plan's page.

    Attributes
    ----------
    exports, links, json_url
        Set on a page of the service.
    shades
        What dark and light mean; empty with a single chunk.
    timeline
        What the script knows about the schedule, as JSON; see
        :func:`~zbv_solver.export.timeline_data.timeline_facts`.
    layers
        Where the model is cut; None if the problem gives stages.
    actions_url
        Where the script gets :func:`~zbv_solver.export.timeline_data.timeline_bytes`.
    data
        The same in the page itself, as Base64.
    """

    plan_id: str
    title: str
    subtitle: str
    cards: tuple[Card, ...]
    legend: tuple[tuple[str, str, str], ...]
    shades: str
    per_rank: tuple[RankBars, ...]
    canvas: GanttCanvas
    has_bars: bool
    has_memory: bool
    example: str
    baselines: tuple[BaselineLine, ...]
    objective: str
    time_unit: str
    ranks: tuple[RankLine, ...]
    facts: tuple[tuple[str, str], ...]
    timeline: Markup
    layers: LayersView | None = None
    exports: tuple[ExportLink, ...] = ()
    links: tuple[PageLink, ...] = ()
    json_url: str | None = None
    actions_url: str | None = None
    data: str | None = None


def template_loader() -> FileSystemLoader:
    """Loads ``plan_body.html.j2`` and the templates that it includes."""
    from jinja2 import FileSystemLoader

    return FileSystemLoader(TEMPLATES)


def plan_view(plan: Plan) -> PlanView:
    """The content of a plan's page, without links and without the actions that its script draws."""
    problem, orders = plan.problem, plan.orders
    has_memory = accounts_for_memory(problem)
    letters = np.unique(plan.orders.letter).tolist()
    return PlanView(
        plan_id=plan.plan_id,
        title=f"{problem.pp_degree} {_plural('rank', problem.pp_degree)} × "
        f"{problem.microbatches} {_plural('microbatch', problem.microbatches)}",
        subtitle=_subtitle(plan),
        cards=tuple(cards_of(plan)),
        legend=tuple((LETTERS[code], palette.NAMES[LETTERS[code]], LETTERS[code]) for code in letters),
        shades=_shades(problem.placement.chunks),
        per_rank=(idle_bars(plan), *([memory_bars(plan)] if has_memory else [])),
        canvas=gantt_canvas(
            problem.pp_degree,
            axis=quantities.titled("time", quantities.time_unit(problem.units)),
            idle=idle_shares(plan),
        ),
        has_bars=len(orders) <= MAX_GLYPHS,
        has_memory=has_memory,
        example=orders.text_at(len(orders) // 2),
        baselines=baselines_of(plan),
        objective=problem.objective,
        time_unit=quantities.time_unit(problem.units),
        ranks=tuple(action_lists(plan)),
        facts=tuple(facts_of(plan)),
        timeline=script_json(timeline_facts(timeline(plan), problem)),
        layers=layers_view(plan),
    )


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}es" if word.endswith("ch") else f"{word}s"


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


FILTERS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        "time": lambda value, unit: quantities.time(value, Units(time=unit)),
        "percent": quantities.percent,
    }
)
"""Jinja2 filters of the templates."""

GLOBALS: Mapping[str, int] = MappingProxyType(
    {"memory_height": MEMORY_HEIGHT, "overview_height": OVERVIEW_HEIGHT}
)
"""Values that the templates need."""
