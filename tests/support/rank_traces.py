"""Traces as ranks write them, of a pipeline with known costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import earliest_times

from support.orders import random_orders


def mixed_orders(problem: Problem, is_fused: Callable[[int], bool]) -> Orders:
    """A random order in which a microbatch's backwards are B where ``is_fused`` says so, else I and W."""
    found = random_orders(problem, Random(1))
    ranks: list[list[Action]] = []
    for rank in range(problem.pp_degree):
        ranks.append([])
        for action in found.actions(rank):
            stage, letter, j = action
            if letter == "F" or (letter == "B") == is_fused(j):
                ranks[-1] += [action] if letter != "W" or not is_fused(j) else []
            elif letter == "B":
                ranks[-1] += [Action(stage, "I", j), Action(stage, "W", j)]
            elif letter == "I":
                ranks[-1].append(Action(stage, "B", j))
    return Orders.from_actions(ranks)


def trace_documents(
    problem: Problem,
    orders: Orders,
    *,
    plan_id: str = "a" * 64,
    first_step: int = 0,
    steps: int = 1,
    replica: int = 0,
    ahead: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """One document per rank, as if the problem's unit were a microsecond and every action took its cost.

    ``ahead`` is what each rank's clock shows more than rank 0's, in nanoseconds.
    """
    start, end = earliest_times(problem, orders)
    length = round(1000 * float(end.max()))
    documents = []
    for rank in range(problem.pp_degree):
        shift = 0 if ahead is None else ahead[rank]
        part, texts = orders.slice_of(rank), list(map(str, orders.actions(rank)))
        entries = []
        for step in range(first_step, first_step + steps):
            at, rows = shift + step * length, []
            turned = at
            for text, begins, ends in zip(texts, start[part].tolist(), end[part].tolist(), strict=True):
                starts = at + round(1000 * begins)  # the second action of a pair starts before the first ends
                rows.append([text, min(turned, starts), starts, at + round(1000 * ends), 0])
                turned = rows[-1][3]
            seconds = (rows[-1][3] - rows[0][2]) / 1e9
            entries.append({"step": step, "loss": None, "seconds": seconds, "actions": rows})
        documents.append(
            {
                "rank": replica * problem.pp_degree + rank,
                "pp_rank": rank,
                "replica": replica,
                "plan_id": plan_id,
                "clock_offset_ns": shift,
                "uncertainty_ns": 50,
                "steps": entries,
            }
        )
    return documents
