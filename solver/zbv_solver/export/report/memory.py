"""Peak memory per rank against its limit, as a small bar picture without script."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.plan import Plan


@dataclass(frozen=True)
class MemoryBar:
    """One rank; heights are percentages of the picture's, ``limit`` None where there is none."""

    rank: int
    height: float
    static: float
    limit: float | None
    over: bool
    text: str


@dataclass(frozen=True)
class MemoryBars:
    """All ranks, and one sentence that says the same."""

    bars: tuple[MemoryBar, ...]
    summary: str


def memory_bars(plan: Plan) -> MemoryBars:
    """Peak memory of every rank, scaled so that the highest peak or limit nearly fills the picture."""
    peaks, memory, units = plan.metrics.peak_memory, plan.problem.memory, plan.problem.units
    limits = memory.limit
    highest = max(peaks, default=0.0)
    # A limit far above every peak would flatten the bars; it is then left to the sentence.
    drawn = limits if limits is not None and max(limits) <= 3 * (highest or 1.0) else None
    scale = 96 / (max(highest, *(drawn or (0.0,))) or 1.0)
    bars = []
    for rank, peak in enumerate(peaks):
        limit = None if limits is None else limits[rank]
        against = "" if limit is None else f" of {quantities.memory(limit, units)}"
        bars.append(
            MemoryBar(
                rank=rank,
                height=round(scale * peak, 2),
                static=round(scale * memory.static[rank], 2),
                limit=round(scale * drawn[rank], 2) if drawn is not None else None,
                over=limit is not None and peak > limit * (1 + 1e-9),
                text=f"rank {rank}: {quantities.memory(peak, units)}{against}",
            )
        )
    return MemoryBars(tuple(bars), _summary(plan, peaks))


def _summary(plan: Plan, peaks: tuple[float, ...]) -> str:
    units, limits = plan.problem.units, plan.problem.memory.limit
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    text = f"Highest: {quantities.memory(peaks[fullest], units)} on rank {fullest}"
    text += (
        f", of {quantities.memory(limits[fullest], units)}. Dashed: the limit." if limits else ". No limit."
    )
    return f"{text} Darker: static memory." if any(plan.problem.memory.static) else text
