"""Idle share and peak memory of every rank, as numbers and as small bar charts without scripts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zbv_solver.export import quantities
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.numeric import SAME_METRIC, exceeds
from zbv_solver.problem.problem import F, Problem

_TALLEST = 96.0
"""Height of the tallest bar in a chart of height 100."""


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


def accounts_for_memory(problem: Problem) -> bool:
    """Whether the problem has memory costs."""
    memory = problem.memory
    return memory.limit is not None or holds_memory(problem)


def holds_memory(problem: Problem) -> bool:
    """Whether a rank ever holds memory."""
    return bool(problem.arrays.delta[F].any()) or any(problem.memory.static)


def idle_shares(plan: Plan) -> list[float]:
    """The share of the span that each rank (p,) is idle: 1 - busy / span. Their mean is the bubble rate."""
    orders, span = plan.orders, plan.metrics.span
    if span <= 0:
        return [0.0] * orders.pp_degree
    duration = plan.problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
    busy = np.bincount(orders.rank_index(), weights=duration, minlength=orders.pp_degree)
    return [float(share) for share in 1 - busy / span]


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
    return RankBars("memory", "Peak memory per rank", tuple(bars), _summary(plan, drawn is not None))


def _summary(plan: Plan, has_line: bool) -> str:
    units, limits, peaks = plan.problem.units, plan.problem.memory.limit, plan.metrics.peak_memory
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    text = f"Highest: {quantities.memory(peaks[fullest], units)} on rank {fullest}"
    text += f", of {quantities.memory(limits[fullest], units)}." if limits else ". No limit."
    if has_line:
        text += " Dashed: the limit."
    return f"{text} Darker: static memory." if any(plan.problem.memory.static) else text
