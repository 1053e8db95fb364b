"""Results of commands as tables for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbv_solver.frontiers.frontier import FrontierPoint
    from zbv_solver.plans.plan import Plan
    from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
    from zbv_solver.problem.problem import Problem
    from zbv_solver.search.claims import CheckedPlan

FIRST_ACTIONS = 16
"""Actions of a rank that a summary shows."""
MOST_RANKS = 16
"""Ranks that a summary shows."""


def print_claims(checked: CheckedPlan) -> None:
    """Print ``valid``, then the verified claims and the unverified ones."""
    lines = ["valid", "verified:"]
    lines += [f"  {claim.text} ({claim.reason})" for claim in checked.verified]
    if checked.unverified:
        lines += ["not verified:"]
        lines += [f"  {claim.text} ({claim.reason})" for claim in checked.unverified]
    sys.stdout.write("\n".join(lines) + "\n")


def print_frontier(problem: AnyProblem, points: Sequence[FrontierPoint]) -> None:
    """The best objective within every memory limit."""
    from zbv_solver.problem.layered_problem import LayeredProblem

    if isinstance(problem, LayeredProblem):
        _print_frontier_of_layers(problem, points)
    else:
        _print_frontier_of_stages(problem, points)


def _print_frontier_of_stages(problem: Problem, points: Sequence[FrontierPoint]) -> None:
    """Limits as fractions of 1F1B's memory, and the classical schedules below."""
    from rich.console import Console
    from rich.table import Table

    from zbv_solver.frontiers.frontier import baseline_points

    objective = problem.objective
    table = Table(title=f"{objective} over memory; 1 is what 1F1B holds on its fullest rank")
    for name in ("limit", "per rank", f"best {objective}", "lower bound", "gap", "plan"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(
            f"{point.fraction:.4g}",
            f"{point.limit:.6g}",
            f"{point.plan.objective:.6g}",
            f"{point.lower_bound:.6g}",
            f"{point.gap:.2%}",
            point.plan.plan_id[:12],
        )
    table.add_section()
    for baseline in sorted(baseline_points(points[0].plan), key=lambda each: each.needs):
        table.add_row(f"{baseline.needs:.4g}", "", f"{baseline.value:.6g}", "", "", baseline.name)
    Console().print(table)


def _print_frontier_of_layers(problem: LayeredProblem, points: Sequence[FrontierPoint]) -> None:
    """Limits as amounts of memory; every limit may have another cut."""
    from rich.console import Console
    from rich.table import Table

    from zbv_solver.export import quantities
    from zbv_solver.frontiers.frontier import recomputed_stages

    objective, units = problem.objective, problem.units
    table = Table(title=f"{objective} over memory; the layers are cut again at every limit")
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
            quantities.memory(point.needs, units),
            f"{recomputed_stages(plan)} of {plan.problem.n_stages}",
            placement.kind if placement.kind != "loop" else f"loop-{placement.chunks}",
            plan.plan_id[:12],
        )
    Console().print(table)


def first_actions(plan: Plan) -> str:
    """The beginning of every rank's actions, one line per rank."""
    lines = []
    for rank, actions in enumerate(plan.orders.all_text()[:MOST_RANKS]):
        more = " …" if len(actions) > FIRST_ACTIONS else ""
        lines.append(f"  rank {rank}: {' '.join(actions[:FIRST_ACTIONS])}{more}\n")
    if plan.problem.pp_degree > MOST_RANKS:
        lines.append(f"  and {plan.problem.pp_degree - MOST_RANKS} more ranks\n")
    return "".join(lines)


def print_comparison(plan: Plan) -> None:
    """Compare a plan with the classical schedules of its problem."""
    from rich.console import Console
    from rich.table import Table

    from zbv_solver.plans.plan import Baseline
    from zbv_solver.problem.problem import objective_value

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
            f"{objective_value(objective, row) / plan.objective:.3f}" if plan.objective else "–",
        )
    Console().print(table)
