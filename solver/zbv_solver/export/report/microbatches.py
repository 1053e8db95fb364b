"""Microbatches that differ, by size and in the order in which they enter the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.construct.tables import sizes
from zbv_solver.export import quantities
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import F

MOST = 256
"""Only as many microbatches have a bar and a row, the first to enter."""


@dataclass(frozen=True)
class MicrobatchRow:
    """A microbatch: the height of its bar in percent, and its numbers as texts."""

    microbatch: int
    height: float
    work: str
    held: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class MicrobatchesView:
    """Microbatches in the order of entry, with the names of their features."""

    features: tuple[str, ...]
    rows: tuple[MicrobatchRow, ...]
    summary: str
    has_memory: bool


def microbatches_view(plan: Plan) -> MicrobatchesView | None:
    """The microbatches of a plan; None if they are equal."""
    problem, arrays, orders = plan.problem, plan.problem.arrays, plan.orders
    if problem.is_equal:
        return None
    work, units = sizes(problem), problem.units
    held = arrays.delta[F].sum(axis=0)[arrays.kind_of]
    entry = orders.microbatch[(orders.stage == 0) & (orders.letter == F)].tolist()
    largest = float(work.max()) or 1.0
    rows = tuple(
        MicrobatchRow(
            microbatch,
            round(100 * float(work[microbatch]) / largest, 2),
            quantities.time(float(work[microbatch]), units),
            quantities.memory(float(held[microbatch]), units),
            tuple(quantities.figure(each.value[microbatch]) for each in problem.features),
        )
        for microbatch in entry[:MOST]
    )
    share = quantities.figure(largest / (float(work.mean()) or 1.0), 2)
    summary = (
        f"Work on all stages in the order of entry: {quantities.times(work.tolist(), units)} per microbatch; "
        f"the largest has {share} times the mean."
    )
    if len(entry) > MOST:
        summary += f" The first {MOST} of {quantities.figure(len(entry), 12)} microbatches are shown."
    return MicrobatchesView(
        tuple(each.name for each in problem.features), rows, summary, bool(arrays.delta[F].any())
    )
