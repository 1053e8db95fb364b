"""The metrics and the problem of a plan: cards, the table of schedules, facts, and bars by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from zbv_solver.export import quantities
from zbv_solver.export.timeline import accounts_for_memory, idle_shares, pair_savings
from zbv_solver.plans.plan import Baseline, Metrics, Plan
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, SAME_METRIC, exceeds
from zbv_solver.problem.problem import LETTERS, B, F, I, O, Problem, Units, W, objective_value
from zbv_solver.problem.stages import Costs, Deltas

SMALLEST_GAP = 1e-4
"""Smaller gaps show as "less than" this one."""
_TALLEST = 96.0
"""Height of the tallest bar in a chart of height 100."""


@dataclass(frozen=True)
class Card:
    """A metric with a line that explains it; ``tone`` is good, bad or empty."""

    label: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True)
class ScheduleRow:
    """A row of a table that compares schedules with a plan."""

    name: str
    span: str
    makespan: str
    bubble: str
    peak: str
    fits: bool | None
    """Whether it fits the plan's memory limit; None if the memory units differ."""
    relative: str
    """Its objective relative to the plan's, in percent; empty for the plan itself."""
    share: float
    """Its objective relative to the largest in the table, from 0 to 1."""
    is_plan: bool
    url: str | None = None
    """The address of its page."""


@dataclass(frozen=True)
class Compared:
    """A schedule to compare with a plan; the attributes are those of :class:`ScheduleRow`."""

    name: str
    metrics: Metrics | Baseline
    units: Units
    fits: bool | None
    url: str | None = None


@dataclass(frozen=True)
class RankBar:
    """One rank; heights are percentages of the chart's, ``limit`` is None if none is drawn."""

    rank: int
    height: float
    base: float
    limit: float | None
    over: bool
    text: str


@dataclass(frozen=True)
class RankBars:
    """All ranks, with a summary in words."""

    name: str
    title: str
    bars: tuple[RankBar, ...]
    summary: str


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
    if (pairs := pair_savings(plan)) is not None:
        time = quantities.timer(pairs.alone, units)
        saved = f"forwards run with a backward; saves {time(pairs.saved)} of {time(pairs.alone)}"
        cards.append(
            Card(
                "Pairs",
                f"{pairs.paired} of {pairs.forwards}",
                saved if pairs.paired else "forwards run with a backward",
            )
        )
    if (copies := plan.orders.copies) is not None:
        forwards = int((plan.orders.letter == F).sum())
        copied = int((copies[:, 1] == O).sum())
        cards.append(
            Card("Copies", f"{copied} of {forwards}", "forwards keep their memory on the host for a time")
        )
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
    rows, time = [], quantities.timer(plan.objective, plan.problem.units)
    for each in schedules:
        metrics, value = each.metrics, objective_value(objective, each.metrics)
        peak = max(metrics.peak_memory, default=0.0)
        rows.append(
            ScheduleRow(
                name=each.name,
                span=time(metrics.span),
                makespan=time(metrics.makespan),
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
    problem, provenance = plan.problem, plan.provenance
    return [
        *cost_facts(problem),
        ("Memory limit", quantities.memories(problem.memory.limit, problem.units)),
        ("Version", provenance.version),
        ("Seed", str(provenance.seed)),
        ("Search time", f"{provenance.seconds:.2f} s"),
        ("Found by", provenance.method),
    ]


def cost_facts(problem: Problem) -> list[tuple[str, str]]:
    """What actions and transfers take, as terms and values: ranges over stages and microbatches."""
    terms = {
        "forward": "Forward F",
        "backward_input": "Backward, input I",
        "backward_weight": "Backward, weight W",
        "backward": "Full backward B",
        "p2p": "Transfer",
    }
    by_microbatch = "" if problem.is_equal else ", by microbatch"
    facts = []
    for name, term in terms.items():
        values = cost_values(problem)[name]
        if values is None:
            facts.append((term, "I + W"))
        else:
            differs = by_microbatch if len(set(values)) > 1 else ""
            facts.append((term, quantities.times(values, problem.units) + differs))
    hidden = problem.arrays.communication
    if hidden is not None:
        for code in (F, I, B):
            values = hidden[code].ravel().tolist()
            facts.append((f"Communication of {LETTERS[code]}", quantities.times(values, problem.units)))
    return [*facts, *((f"Feature {each.name}", quantities.spread(each.value)) for each in problem.features)]


def cost_values(problem: Problem) -> dict[str, tuple[float, ...] | None]:
    """The costs and deltas of memory by their names in a document, of every stage and microbatch.

    If all microbatches are equal, there is one value per stage or boundary, as the user stated it; otherwise
    boundaries inside a rank do not count. B is None if it costs I + W.
    """
    costs, memory = problem.costs, problem.memory
    if problem.is_equal and not problem.features:
        held = {f"memory {field.name}": getattr(memory, field.name) for field in fields(Deltas)}
        return {field.name: getattr(costs, field.name) for field in fields(Costs)} | held
    arrays = problem.arrays
    every, placement, boundaries = arrays.kind_of, problem.placement, range(problem.n_stages - 1)
    tables = {
        "forward": arrays.duration[F],
        "backward_input": arrays.duration[I],
        "backward_weight": arrays.duration[W],
        "backward": None if costs.backward is None else arrays.duration[B],
        "p2p": arrays.latency[[not is_local for is_local in map(placement.is_local, boundaries)]],
        "memory forward": arrays.delta[F],
        "memory backward_input": arrays.delta[I],
        "memory backward_weight": arrays.delta[W],
    }
    return {
        name: None if table is None else tuple(table[:, every].ravel().tolist())
        for name, table in tables.items()
    }


def idle_bars(plan: Plan) -> RankBars:
    """Idle share of the span of every rank, scaled so that the largest nearly fills the chart."""
    # Rounding errors must not fill the chart when no rank is idle.
    shares = [share if share > SAME_METRIC else 0.0 for share in idle_shares(plan)]
    scale = _TALLEST / (max(shares, default=0.0) or 1.0)
    bars = tuple(
        RankBar(rank, round(scale * share, 2), 0.0, None, False, f"rank {rank}: {quantities.percent(share)}")
        for rank, share in enumerate(shares)
    )
    idlest = max(range(len(shares)), key=shares.__getitem__)
    mean = quantities.percent(plan.metrics.bubble_rate)
    if max(shares) - min(shares) < SAME_METRIC:
        summary = f"{mean} of the span on every rank." if len(shares) > 1 else f"{mean} of the span."
    else:
        summary = f"{mean} of the span on average, at most {quantities.percent(shares[idlest])}"
        summary += f" on rank {idlest}."
    return RankBars("idle", "Idle time per rank", bars, summary)


def memory_bars(plan: Plan) -> RankBars:
    """Peak memory of every rank, scaled so that the highest peak or limit nearly fills the chart."""
    peaks, memory, units = plan.metrics.peak_memory, plan.problem.memory, plan.problem.units
    limits = memory.limit
    highest = max(peaks, default=0.0)
    # A limit far above every peak would flatten the bars; then only the summary mentions it.
    drawn = limits if limits is not None and max(limits) <= 3 * (highest or 1.0) else None
    scale = _TALLEST / (max(highest, *(drawn or (0.0,))) or 1.0)
    bars = []
    for rank, peak in enumerate(peaks):
        limit = None if limits is None else limits[rank]
        against = "" if limit is None else f" of {quantities.memory(limit, units)}"
        bars.append(
            RankBar(
                rank=rank,
                height=round(scale * peak, 2),
                base=round(scale * memory.static[rank], 2),
                limit=round(scale * drawn[rank], 2) if drawn is not None else None,
                over=limit is not None and exceeds(peak, limit),
                text=f"rank {rank}: {quantities.memory(peak, units)}{against}",
            )
        )
    return RankBars("memory", "Peak memory per rank", tuple(bars), _memory_summary(plan, drawn is not None))


def _memory_summary(plan: Plan, has_line: bool) -> str:
    units, limits, peaks = plan.problem.units, plan.problem.memory.limit, plan.metrics.peak_memory
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    text = f"Highest: {quantities.memory(peaks[fullest], units)} on rank {fullest}"
    text += f", of {quantities.memory(limits[fullest], units)}." if limits else ". No limit."
    if has_line:
        text += " Dashed: the limit."
    return f"{text} Darker: static memory." if any(plan.problem.memory.static) else text


def _use(peak: float, limit: float) -> float:
    if limit:
        return peak / limit
    return math.inf if peak else 0.0


def _gap(gap: float) -> str:
    """The gap of a plan without a proof of optimality; never shown as 0."""
    return quantities.percent(gap) if gap >= SMALLEST_GAP else f"< {quantities.percent(SMALLEST_GAP)}"
