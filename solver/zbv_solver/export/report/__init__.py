"""What a plan's page says, ready for a template: the service's page and the standalone file are the same.

:func:`plan_view` turns a plan into texts and numbers, ``templates/plan_body.html.j2`` lays them out, and
``static/`` holds the one style sheet of all pages and the scripts of those with a Gantt chart.
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
from zbv_solver.export.dimensions import chart_height, rows_height
from zbv_solver.export.per_rank import RankBars, accounts_for_memory, idle_bars, memory_bars
from zbv_solver.export.report.action_lists import RankLine, action_lists
from zbv_solver.export.report.figures import BaselineLine, Card, baselines_of, cards_of, facts_of
from zbv_solver.export.report.layers import LayersView, layers_view
from zbv_solver.export.timeline import timeline
from zbv_solver.export.timeline_data import MAX_GLYPHS, timeline_facts
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, Units

if TYPE_CHECKING:
    from jinja2 import FileSystemLoader

__all__ = [
    "DRAWING_SCRIPTS",
    "FILTERS",
    "SCRIPTS",
    "STATIC",
    "TEMPLATES",
    "BaselineLine",
    "Card",
    "ExportLink",
    "PageLink",
    "PlanView",
    "chart_document",
    "chart_item",
    "plan_view",
    "script_json",
    "template_loader",
]

STATIC: Path = Path(__file__).parent / "static"
TEMPLATES: Path = Path(__file__).parent / "templates"

DRAWING_SCRIPTS: tuple[str, ...] = (
    "colours.js",
    "numbers.js",
    "timeline.js",
    "raster.js",
    "gantt.js",
    "follow.js",
    "words.js",
    "hover.js",
)
"""What a page with Gantt charts loads from ``static/``, in this order, after Bokeh."""
SCRIPTS: tuple[str, ...] = (*DRAWING_SCRIPTS, "memory.js", "preview.js", "inspector.js", "plan.js")
"""What a plan's page loads. The last of them loads Bokeh, or waits for it."""


@dataclass(frozen=True)
class ExportLink:
    """A format that the page offers, and where it is."""

    name: str
    url: str
    description: str


@dataclass(frozen=True)
class PageLink:
    """Where one can go from a plan, or what one can take along; ``note`` says what it does."""

    label: str
    url: str
    note: str


@dataclass(frozen=True)
class PlanView:
    """Everything that a plan's page shows.

    Attributes
    ----------
    exports, links, json_url
        Of a page of the service.
    shades
        What dark and light mean, empty where there is but one.
    picture_url
        What stands for the chart until it is drawn: the schedule and nothing else, over the whole time.
    timeline
        What the script knows of the schedule, as JSON; see
        :func:`~zbv_solver.export.timeline_data.timeline_facts`.
    layers
        Where the model is cut; None where the stages were given.
    actions_url, chart_url, bokeh_url
        Where the script gets :func:`~zbv_solver.export.timeline_data.timeline_bytes`, then
        :func:`chart_document` and what draws it.
    data, chart
        The first two in the page itself, as Base64 and as JSON.
    """

    plan_id: str
    title: str
    subtitle: str
    cards: tuple[Card, ...]
    legend: tuple[tuple[str, str, str], ...]
    shades: str
    per_rank: tuple[RankBars, ...]
    chart_height: int
    rows_height: int
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
    picture_url: str | None = None
    actions_url: str | None = None
    chart_url: str | None = None
    bokeh_url: str | None = None
    data: str | None = None
    chart: Markup | None = None


def template_loader() -> FileSystemLoader:
    """Where a Jinja2 environment finds ``plan_body.html.j2`` and what it includes."""
    from jinja2 import FileSystemLoader

    return FileSystemLoader(TEMPLATES)


def plan_view(plan: Plan) -> PlanView:
    """A plan as its page shows it, without links, and without what its script draws. Loads no Bokeh."""
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
        chart_height=chart_height(problem.pp_degree, has_memory=has_memory),
        rows_height=rows_height(problem.pp_degree),
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


def chart_document(plan: Plan) -> dict[str, Any]:
    """What the script draws a chart with, as JSON takes it: Bokeh's document, and rules of colour."""
    from zbv_solver.export.plan_chart import plan_chart

    chart = plan_chart(plan, timeline(plan))
    return {"item": chart_item(chart.layout), "rules": chart.rules}


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: no character in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def chart_item(layout: Any) -> Any:
    """A Bokeh layout as ``zbv.embed`` of ``static/colours.js`` takes it."""
    from bokeh import __version__
    from bokeh.document import Document

    # As bokeh.embed.json_item, without its checks of the model: they take a quarter of the time.
    document = Document()
    document.add_root(layout)
    return {"root_id": layout.id, "doc": document.to_json(deferred=False), "version": __version__}


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
"""Jinja2 filters that the templates use."""
