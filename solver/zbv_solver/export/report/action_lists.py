"""The list of actions of every rank on the page."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.export.palette import PALETTE_SHADES
from zbv_solver.export.per_rank import accounts_for_memory
from zbv_solver.plans.plan import Plan

MAX_CHIPS = 4000
"""The lists colour every action of plans with at most this many."""
MAX_LISTED = 30_000
"""Of plans with more actions the page lists only the first ones of every rank."""
LISTED_PER_RANK = 200


@dataclass(frozen=True)
class Chip:
    """An action of a list; ``style`` is the class of its colour."""

    text: str
    style: str


@dataclass(frozen=True)
class RankLine:
    """A rank's list of actions, as coloured ``chips`` or as plain ``text``.

    ``peak`` is empty where the problem says nothing of memory.
    """

    rank: int
    stages: str
    count: int
    busy: str
    peak: str
    chips: tuple[Chip, ...]
    text: str
    omitted: int


def action_lists(plan: Plan) -> list[RankLine]:
    """A list for every rank, shortened for large plans."""
    orders, problem = plan.orders, plan.problem
    chips, has_memory = len(orders) <= MAX_CHIPS, accounts_for_memory(problem)
    span = plan.metrics.span or 1.0
    duration = problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
    lines = []
    for rank in range(orders.pp_degree):
        count = orders.slice_of(rank).stop - orders.slice_of(rank).start
        listed = count if len(orders) <= MAX_LISTED else min(count, LISTED_PER_RANK)
        stages = problem.placement.stages_of[rank]
        lines.append(
            RankLine(
                rank=rank,
                stages=f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}",
                count=count,
                busy=quantities.percent(float(duration[orders.slice_of(rank)].sum()) / span, 1),
                peak=quantities.memory(plan.metrics.peak_memory[rank], problem.units) if has_memory else "",
                chips=tuple(_chips(plan, rank)) if chips else (),
                text="" if chips else " ".join(orders.text(rank, listed)),
                omitted=count - listed,
            )
        )
    return lines


def _chips(plan: Plan, rank: int) -> list[Chip]:
    chunk_of = plan.problem.placement.chunk_of
    return [
        Chip(str(action), f"{action.letter}{chunk_of[action.stage] % PALETTE_SHADES}")
        for action in plan.orders.actions(rank)
    ]
