"""What a plan's page says, ready for a template: the service's page and the standalone file are the same.

:func:`plan_view` turns a plan into texts and numbers, ``templates/plan_body.html.j2`` lays them out, and
``static/`` holds the one style sheet and the one script of all pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from zbv_solver.export import palette, quantities
from zbv_solver.export.report.memory import MemoryBars, memory_bars
from zbv_solver.plan import Plan
from zbv_solver.problem import LETTERS, Problem, Units

if TYPE_CHECKING:
    from jinja2 import FileSystemLoader

STATIC: Path = Path(__file__).parent / "static"
TEMPLATES: Path = Path(__file__).parent / "templates"

MAX_CHIPS = 4000
"""Up to this many actions the lists colour every one."""
MAX_LISTED = 30_000
"""Above this many actions the page lists only the beginning of every rank."""
LISTED_PER_RANK = 200


@dataclass(frozen=True)
class ExportLink:
    """A format that the page offers, and where it is."""

    name: str
    url: str
    description: str


@dataclass(frozen=True)
class Card:
    """A number that matters, with a line that says how to read it; ``tone`` is good, bad or empty."""

    label: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True)
class BaselineLine:
    """A row of the table of schedules; ``share`` is its objective relative to the largest, from 0 to 1."""

    name: str
    span: str
    makespan: str
    bubble: str
    peak: str
    fits: bool
    relative: str
    share: float
    is_plan: bool = False


@dataclass(frozen=True)
class Chip:
    """An action of a list; ``style`` is the class of its colour."""

    text: str
    style: str


@dataclass(frozen=True)
class RankLine:
    """A rank's list of actions. ``chips`` is empty where ``text`` carries them without colour."""

    rank: int
    stages: str
    count: int
    busy: str
    peak: str
    chips: tuple[Chip, ...]
    text: str
    omitted: int


@dataclass(frozen=True)
class PlanView:
    """Everything that a plan's page shows."""

    plan_id: str
    title: str
    subtitle: str
    cards: tuple[Card, ...]
    legend: tuple[tuple[str, str, str], ...]
    chunked: bool
    memory: MemoryBars | None
    chart: Markup
    rules: Markup
    whole: bool
    baselines: tuple[BaselineLine, ...]
    objective: str
    time_unit: str
    ranks: tuple[RankLine, ...]
    exports: tuple[ExportLink, ...]
    json_url: str | None
    facts: tuple[tuple[str, str], ...]


def template_loader() -> FileSystemLoader:
    """Where a Jinja2 environment finds ``plan_body.html.j2`` and what it includes."""
    from jinja2 import FileSystemLoader

    return FileSystemLoader(TEMPLATES)


def plan_view(plan: Plan, *, exports: Sequence[ExportLink] = (), json_url: str | None = None) -> PlanView:
    """A plan as its page shows it."""
    from zbv_solver.export.gantt import plan_chart
    from zbv_solver.export.memory_chart import accounts_for_memory

    problem = plan.problem
    chart = plan_chart(plan)
    letters = sorted(set(plan.orders.letter.tolist()))
    return PlanView(
        plan_id=plan.plan_id,
        title=f"{problem.pp_degree} {_plural('rank', problem.pp_degree)} × "
        f"{problem.microbatches} {_plural('microbatch', problem.microbatches)}",
        subtitle=_subtitle(plan),
        cards=tuple(_cards(plan)),
        legend=tuple((LETTERS[code], palette.NAMES[LETTERS[code]], LETTERS[code]) for code in letters),
        chunked=problem.placement.chunks > 1,
        memory=memory_bars(plan) if accounts_for_memory(problem) else None,
        chart=script_json(_chart_item(chart.layout)),
        rules=script_json(chart.rules),
        whole=chart.glyphs,
        baselines=_baselines(plan),
        objective=problem.objective,
        time_unit=quantities.time_unit(problem.units),
        ranks=tuple(_ranks(plan)),
        exports=tuple(exports),
        json_url=json_url,
        facts=tuple(_facts(plan)),
    )


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: no character in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _chart_item(layout: Any) -> Any:
    from bokeh.core.types import ID
    from bokeh.embed import json_item

    return json_item(layout, ID("chart"))


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}es" if word.endswith("ch") else f"{word}s"


def _subtitle(plan: Plan) -> str:
    placement = {"v": "V placement", "loop": "looped placement", "single": "one stage per rank"}
    return (
        f"{placement[plan.problem.placement.kind]}, {plan.problem.n_stages} stages, "
        f"{len(plan.orders):,} actions, optimised for {plan.problem.objective}"
    )


def _cards(plan: Plan) -> list[Card]:
    metrics, problem = plan.metrics, plan.problem
    units, limits = problem.units, problem.memory.limit
    optimal = metrics.status == "optimal"
    bound = f"no plan is below {quantities.time(metrics.lower_bound, units)}"
    cards = [
        Card("Span", quantities.time(metrics.span, units), "one iteration, back to back"),
        Card("Makespan", quantities.time(metrics.makespan, units), "first start to last end"),
        Card("Bubble", quantities.percent(metrics.bubble_rate), "idle share of a span"),
        Card(
            "Gap to the bound",
            "0" if optimal else quantities.percent(metrics.gap),
            f"proved optimal: {bound}" if optimal else bound,
            "good" if optimal else "",
        ),
    ]
    peak = max(metrics.peak_memory, default=0.0)
    if limits is not None:
        use = max(
            (m / x if x else 0.0 for m, x in zip(metrics.peak_memory, limits, strict=True)), default=0.0
        )
        note = f"{quantities.percent(use, 0)} of the limit"
        cards.append(
            Card("Peak memory", quantities.memory(peak, units), note, "bad" if use > 1 + 1e-9 else "")
        )
    else:
        cards.append(Card("Peak memory", quantities.memory(peak, units), "no limit was given"))
    return cards


def _baselines(plan: Plan) -> tuple[BaselineLine, ...]:
    metrics, units, objective = plan.metrics, plan.problem.units, plan.problem.objective
    values = [plan.objective, *(getattr(baseline, objective) for baseline in plan.baselines)]
    largest = max(values) or 1.0

    def row(name: str, source: Any, *, fits: bool, is_plan: bool = False) -> BaselineLine:
        value: float = getattr(source, objective)
        return BaselineLine(
            name=name,
            span=quantities.figure(source.span),
            makespan=quantities.figure(source.makespan),
            bubble=quantities.percent(source.bubble_rate),
            peak=quantities.memory(max(source.peak_memory, default=0.0), units),
            fits=fits,
            relative="" if is_plan else quantities.relative(value, plan.objective),
            share=value / largest,
            is_plan=is_plan,
        )

    return (
        row("this plan", metrics, fits=True, is_plan=True),
        *(row(baseline.name, baseline, fits=baseline.fits) for baseline in plan.baselines),
    )


def _ranks(plan: Plan) -> list[RankLine]:
    orders, problem = plan.orders, plan.problem
    chips = len(orders) <= MAX_CHIPS
    span = plan.metrics.span or 1.0
    duration = problem.arrays.duration[orders.letter, orders.stage]
    lines = []
    for rank in range(orders.pp_degree):
        count = orders.slice_of(rank).stop - orders.slice_of(rank).start
        listed = count if len(orders) <= MAX_LISTED else min(count, LISTED_PER_RANK)
        texts = orders.text(rank)[:listed]
        stages = problem.placement.stages_of[rank]
        lines.append(
            RankLine(
                rank=rank,
                stages=f"{_plural('stage', len(stages))} {', '.join(map(str, stages))}",
                count=count,
                busy=quantities.percent(float(duration[orders.slice_of(rank)].sum()) / span, 1),
                peak=quantities.memory(plan.metrics.peak_memory[rank], problem.units),
                chips=tuple(_chips(plan, rank)) if chips else (),
                text="" if chips else " ".join(texts),
                omitted=count - listed,
            )
        )
    return lines


def _chips(plan: Plan, rank: int) -> list[Chip]:
    chunk_of = plan.problem.placement.chunk_of
    return [
        Chip(str(action), f"{action.letter}{palette.shade(chunk_of[action.stage])}")
        for action in plan.orders.actions(rank)
    ]


def _facts(plan: Plan) -> list[tuple[str, str]]:
    costs, provenance = plan.problem.costs, plan.provenance
    unit = quantities.time_unit(plan.problem.units)
    facts = [
        ("Forward F", _spread(costs.forward, unit)),
        ("Backward, input I", _spread(costs.backward_input, unit)),
        ("Backward, weight W", _spread(costs.backward_weight, unit)),
    ]
    if costs.backward is not None:
        facts.append(("Full backward B", _spread(costs.backward, unit)))
    facts.append(("Transfer", _spread(costs.p2p, unit)))
    facts.append(("Memory limit", _limit(plan.problem)))
    facts.append(("Version", provenance.version))
    facts.append(("Found by", f"{provenance.method}, seed {provenance.seed}, {provenance.seconds:.2f} s"))
    return facts


def _limit(problem: Problem) -> str:
    if problem.memory.limit is None:
        return "none"
    low, high = min(problem.memory.limit), max(problem.memory.limit)
    text = quantities.memory(low, problem.units)
    return text if low == high else f"{text} to {quantities.memory(high, problem.units)}"


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "none"
    low, high = quantities.figure(min(values)), quantities.figure(max(values))
    return " ".join(filter(None, [low if low == high else f"{low} to {high}", unit]))


FILTERS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        "time": lambda value, unit: quantities.time(value, Units(time=unit)),
        "percent": quantities.percent,
    }
)
"""Jinja2 filters that the templates use."""
