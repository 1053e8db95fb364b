"""How a model was cut, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbv_solver.plan import Plan


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
    return "".join(f"{line}\n" for line in lines)


def _shown(names: Sequence[str]) -> str:
    return " … ".join(dict.fromkeys((names[0], names[-1]))) if names else "nothing"
