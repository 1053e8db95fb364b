"""The metrics and the problem of a plan as texts: cards, the table of schedules, facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.export.per_rank import accounts_for_memory
from zbv_solver.plans.plan import Baseline, Metrics, Plan
from zbv_solver.problem.numeric import MEMORY_TOLERANCE
from zbv_solver.problem.problem import Units, objective_value

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
class ScheduleRow:
    """A row of a table that compares schedules with a plan.

    Attributes
    ----------
    fits
        Whether it fits the plan's memory limit; None if the memory units differ.
    relative
        Its objective relative to the plan's, in percent; empty for the plan itself.
    share
        Its objective relative to the largest in the table, from 0 to 1.
    url
        The address of its page.
    """

    name: str
    span: str
    makespan: str
    bubble: str
    peak: str
    fits: bool | None
    relative: str
    share: float
    is_plan: bool
    url: str | None = None


@dataclass(frozen=True)
class Compared:
    """A schedule to compare with a plan; the attributes are those of :class:`ScheduleRow`."""

    name: str
    metrics: Metrics | Baseline
    units: Units
    fits: bool | None
    url: str | None = None


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
    peak = quantities.memory(max(metrics.peak_memory, default=0.0), units)
    if limits is not None:
        use = max(map(_use, metrics.peak_memory, limits), default=0.0)
        tone = "bad" if use > 1 + MEMORY_TOLERANCE else ""
        cards.append(Card("Peak memory", peak, f"{quantities.percent(use, 0)} of the limit", tone))
    elif accounts_for_memory(problem):
        cards.append(Card("Peak memory", peak, "no limit"))
    else:
        cards.append(Card("Peak memory", "–", "the problem has no memory costs"))
    return cards


def schedule_rows(plan: Plan, schedules: Sequence[Compared]) -> tuple[ScheduleRow, ...]:
    """Schedules as rows of a table; the first one is the plan itself."""
    objective, own = plan.problem.objective, schedules[0]
    largest = max(objective_value(objective, each.metrics) for each in schedules) or 1.0
    rows = []
    for each in schedules:
        metrics, value = each.metrics, objective_value(objective, each.metrics)
        peak = max(metrics.peak_memory, default=0.0)
        rows.append(
            ScheduleRow(
                name=each.name,
                span=quantities.figure(metrics.span),
                makespan=quantities.figure(metrics.makespan),
                bubble=quantities.percent(metrics.bubble_rate),
                peak=quantities.memory(peak, each.units) if peak else "–",
                fits=each.fits,
                relative="" if each is own else quantities.relative(value, plan.objective),
                share=value / largest,
                is_plan=each is own,
                url=each.url,
            )
        )
    return tuple(rows)


def facts_of(plan: Plan) -> list[tuple[str, str]]:
    """The problem's costs and limit, and the plan's origin, as terms and values; the longest come last."""
    costs, units, provenance = plan.problem.costs, plan.problem.units, plan.provenance
    return [
        ("Forward F", quantities.times(costs.forward, units)),
        ("Backward, input I", quantities.times(costs.backward_input, units)),
        ("Backward, weight W", quantities.times(costs.backward_weight, units)),
        *([("Full backward B", quantities.times(costs.backward, units))] if costs.backward else []),
        ("Transfer", quantities.times(costs.p2p, units)),
        ("Memory limit", quantities.memories(plan.problem.memory.limit, units)),
        ("Version", provenance.version),
        ("Seed", str(provenance.seed)),
        ("Search time", f"{provenance.seconds:.2f} s"),
        ("Found by", provenance.method),
    ]


def _use(peak: float, limit: float) -> float:
    if limit:
        return peak / limit
    return math.inf if peak else 0.0


def _gap(gap: float) -> str:
    """The gap of a plan without a proof of optimality; never shown as 0."""
    return quantities.percent(gap) if gap >= SMALLEST_GAP else f"< {quantities.percent(SMALLEST_GAP)}"
