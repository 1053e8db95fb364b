"""Results as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbv_solver.frontiers.by_layers import LayeredPoint
    from zbv_solver.frontiers.by_stages import FrontierPoint
    from zbv_solver.frontiers.limits import Known
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.layered_problem import LayeredProblem
    from zbv_solver.search.claims import CheckedPlan


def print_claims(checked: CheckedPlan) -> None:
    """``valid``, then the claims that are verified and those that are not."""
    lines = ["valid", "verified:"]
    lines += [f"  {claim.text} ({claim.reason})" for claim in checked.verified]
    if checked.unverified:
        lines += ["not verified:"]
        lines += [f"  {claim.text} ({claim.reason})" for claim in checked.unverified]
    sys.stdout.write("\n".join(lines) + "\n")


def print_frontier(objective: str, points: Sequence[FrontierPoint], baselines: Iterable[Known]) -> None:
    """The best objective within every memory limit, and the classical schedules."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{objective} over memory; 1 is what 1F1B holds on its fullest rank")
    for name in ("limit", "per rank", f"best {objective}", "lower bound", "gap", "plan"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            f"{point.fraction:.4g}",
            f"{point.limit:.6g}",
            f"{point.best.value:.6g}",
            f"{point.lower_bound:.6g}",
            f"{point.gap:.2%}",
            point.best.name[:12],
        )
    table.add_section()
    for baseline in sorted(baselines, key=lambda each: each.needs):
        table.add_row(f"{baseline.needs:.4g}", "", f"{baseline.value:.6g}", "", "", baseline.name)
    Console().print(table)


def print_layered_frontier(problem: LayeredProblem, points: Sequence[LayeredPoint]) -> None:
    """The best objective within every memory limit where layers are cut anew for each."""
    from rich.console import Console
    from rich.table import Table

    from zbv_solver.export import quantities
    from zbv_solver.frontiers.by_layers import needs, recomputed

    objective, units = problem.objective, problem.units
    table = Table(title=f"{objective} over memory; the layers are cut anew for every limit")
    for name in ("limit", f"best {objective}", "lower bound", "gap", "needs", "recomputed", "placement"):
        table.add_column(name, justify="right")
    table.add_column("plan")
    for point in points:
        plan = point.plan
        placement = plan.problem.placement
        table.add_row(
            quantities.memory(point.limit, units),
            f"{plan.objective:.6g}",
            f"{point.lower_bound:.6g}",
            f"{point.gap:.2%}",
            quantities.memory(needs(plan), units),
            f"{recomputed(plan)} of {plan.problem.n_stages}",
            placement.kind if placement.kind != "loop" else f"loop-{placement.chunks}",
            plan.plan_id[:12],
        )
    Console().print(table)


def print_comparison(plan: Plan) -> None:
    """A plan beside the classical schedules of its problem."""
    from rich.console import Console
    from rich.table import Table

    from zbv_solver.plans.plan import Baseline

    objective = plan.problem.objective
    table = Table(title=f"lower bound of {objective}: {plan.metrics.lower_bound:.6g}")
    for name in ("schedule", "span", "makespan", "bubble rate", "peak memory", "fits", f"{objective} / plan"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=name == "schedule")
    metrics = plan.metrics
    own = Baseline("zbv", metrics.span, metrics.makespan, metrics.bubble_rate, metrics.peak_memory, fits=True)
    for row in (own, *plan.baselines):
        table.add_row(
            row.name,
            f"{row.span:.6g}",
            f"{row.makespan:.6g}",
            f"{row.bubble_rate:.2%}",
            f"{max(row.peak_memory):.4g}",
            "yes" if row.fits else "no",
            f"{getattr(row, objective) / plan.objective:.3f}" if plan.objective else "–",
        )
    Console().print(table)
