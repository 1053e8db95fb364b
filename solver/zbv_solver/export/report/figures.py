"""The metrics and the problem of a plan as texts: cards, the table of schedules, facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zbv_solver.export import quantities
from zbv_solver.export.per_rank import accounts_for_memory
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Problem

SMALLEST_GAP = 1e-4
"""Smaller gaps show as "less than" this one."""


@dataclass(frozen=True)
class Card:
    """A metric with a line that explains it; ``tone`` is good, bad or empty."""

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


def cards_of(plan: Plan) -> list[Card]:
    """The most important metrics."""
    metrics, problem = plan.metrics, plan.problem
    units, limits = problem.units, problem.memory.limit
    optimal = metrics.status == "optimal"
    subject = "no plan of this cut" if problem.model is not None else "no plan"
    bound = f"{subject} is below {quantities.time(metrics.lower_bound, units)}"
    cards = [
        Card("Span", quantities.time(metrics.span, units), "one iteration, back to back"),
        Card("Makespan", quantities.time(metrics.makespan, units), "first start to last end"),
        Card("Bubble", quantities.percent(metrics.bubble_rate), "idle share of a span"),
        Card(
            "Gap to the bound",
            "0" if optimal else _gap(metrics.gap),
            f"proved optimal: {bound}" if optimal else bound,
            "good" if optimal else "",
        ),
    ]
    peak = max(metrics.peak_memory, default=0.0)
    if limits is not None:
        use = max(map(_use, metrics.peak_memory, limits), default=0.0)
        note = f"{quantities.percent(use, 0)} of the limit"
        cards.append(
            Card(
                "Peak memory",
                quantities.memory(peak, units),
                note,
                "bad" if use > 1 + MEMORY_TOLERANCE else "",
            )
        )
    elif accounts_for_memory(problem):
        cards.append(Card("Peak memory", quantities.memory(peak, units), "no limit"))
    else:
        cards.append(Card("Peak memory", "–", "the problem has no memory costs"))
    return cards


def baselines_of(plan: Plan) -> tuple[BaselineLine, ...]:
    """The plan and its baselines."""
    metrics, units, objective = plan.metrics, plan.problem.units, plan.problem.objective
    values = [plan.objective, *(getattr(baseline, objective) for baseline in plan.baselines)]
    largest = max(values) or 1.0
    has_memory = accounts_for_memory(plan.problem)

    def row(name: str, source: Any, *, fits: bool, is_plan: bool = False) -> BaselineLine:
        value: float = getattr(source, objective)
        return BaselineLine(
            name=name,
            span=quantities.figure(source.span),
            makespan=quantities.figure(source.makespan),
            bubble=quantities.percent(source.bubble_rate),
            peak=quantities.memory(max(source.peak_memory, default=0.0), units) if has_memory else "–",
            fits=fits,
            relative="" if is_plan else quantities.relative(value, plan.objective),
            share=value / largest,
            is_plan=is_plan,
        )

    return (
        row("this plan", metrics, fits=True, is_plan=True),
        *(row(baseline.name, baseline, fits=baseline.fits) for baseline in plan.baselines),
    )


def facts_of(plan: Plan) -> list[tuple[str, str]]:
    """The problem's costs and limit, and the plan's origin, as terms and values; the longest come last."""
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
    facts.append(("Seed", str(provenance.seed)))
    facts.append(("Search time", f"{provenance.seconds:.2f} s"))
    facts.append(("Found by", provenance.method))
    return facts


def _use(peak: float, limit: float) -> float:
    if limit:
        return peak / limit
    return math.inf if peak else 0.0


def _gap(gap: float) -> str:
    """The gap of a plan without a proof of optimality; never shown as 0."""
    return quantities.percent(gap) if gap >= SMALLEST_GAP else f"< {quantities.percent(SMALLEST_GAP)}"


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
