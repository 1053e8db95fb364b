"""How a model was cut, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.problem import Problem

COARSE = 0.03
"""Share above the mean load from which on it is worth saying that whole layers do not go up evenly."""


def cut_summary(plan: Plan) -> str:
    """Which layers every rank has, and how much better any other cut could be; empty without layers."""
    problem, model = plan.problem, plan.problem.model
    if model is None:
        return ""
    lines = []
    for rank, stages in enumerate(problem.placement.stages_of):
        parts = [
            _shown(model.partition[stage]) + (" (recomputed)" if model.cut.recompute[stage] else "")
            for stage in stages
        ]
        load = problem.busy_time(rank) / problem.microbatches
        lines.append(f"  rank {rank}: {' | '.join(parts)}; {load:.6g} a microbatch")
    if plan.cut is not None:
        lines.append(
            f"  placement {problem.placement.kind}; no cut of these layers has a {problem.objective} below "
            f"{plan.cut.lower_bound:.6g} (gap {plan.cut.gap:.2%})"
        )
        above = _least_above_mean(problem, plan.cut.lower_bound)
        if above >= COARSE:
            lines.append(
                f"  whole layers do not go up evenly: some rank has at least {above:.0%} more than the mean; "
                "finer layers (attention and MLP apart) may help"
            )
    return "".join(f"{line}\n" for line in lines)


def _least_above_mean(problem: Problem, lower_bound: float) -> float:
    """By what share the most loaded rank of any cut has more to do than the ranks of this one on average."""
    mean = sum(map(problem.busy_time, range(problem.pp_degree))) / problem.pp_degree
    return lower_bound / mean - 1 if mean > 0 else 0.0


def _shown(names: Sequence[str]) -> str:
    return " … ".join(dict.fromkeys((names[0], names[-1]))) if names else "nothing"
