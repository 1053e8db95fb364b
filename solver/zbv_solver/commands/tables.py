"""Results of searches for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from zbv_solver.commands.messages import print_whole, table_of
from zbv_solver.export import quantities
from zbv_solver.frontiers.frontier import FrontierPoint, baseline_points, recomputed_stages
from zbv_solver.plans.plan import Baseline, Plan, Simulation
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem, objective_value

FIRST_ACTIONS = 16
"""Actions of a rank that a summary shows."""
MOST_RANKS = 16
"""Ranks that a summary shows."""
UNEVEN = 0.03
"""The summary suggests finer layers if some rank must have at least this share more work than the mean."""


def print_frontier(problem: AnyProblem, points: Sequence[FrontierPoint]) -> None:
    """The best objective within every memory limit."""
    if isinstance(problem, LayeredProblem):
        table = _frontier_of_layers(problem, points)
    else:
        table = _frontier_of_stages(problem, points)
    print_whole(table)


def _frontier_of_stages(problem: Problem, points: Sequence[FrontierPoint]) -> Table:
    """Limits as fractions of 1F1B's memory, and the classical schedules below."""
    objective, units = problem.objective, problem.units
    title = f"{objective} over memory; 1 is what 1F1B holds on its fullest rank"
    baselines = sorted(baseline_points(points[0].plan), key=lambda each: each.needs)
    time = quantities.timer(points[-1].plan.objective, units)
    rows = [
        (
            quantities.figure(point.fraction or 0.0),
            quantities.memory(point.limit, units),
            time(point.plan.objective),
            time(point.lower_bound),
            quantities.percent(point.gap),
            point.plan.plan_id[:12],
        )
        for point in points
    ]
    table = table_of(title, ("limit", "per rank", f"best {objective}", "lower bound", "gap", "plan"), rows)
    table.add_section()
    for baseline in baselines:
        table.add_row(quantities.figure(baseline.needs), "", time(baseline.value), "", "", baseline.name)
    return table


def _frontier_of_layers(problem: LayeredProblem, points: Sequence[FrontierPoint]) -> Table:
    """Limits as amounts of memory; every limit may have another cut."""
    objective, units = problem.objective, problem.units
    columns = ("limit", f"best {objective}", "lower bound", "gap", "needs", "recomputed", "placement", "plan")
    time = quantities.timer(points[-1].plan.objective, units)
    rows = (
        (
            quantities.memory(point.limit, units),
            time(point.plan.objective),
            time(point.lower_bound),
            quantities.percent(point.gap),
            quantities.memory(point.needs, units),
            f"{recomputed_stages(point.plan)} of {point.plan.problem.n_stages}",
            point.plan.problem.placement.name,
            point.plan.plan_id[:12],
        )
        for point in points
    )
    return table_of(f"{objective} over memory; the layers are cut again at every limit", columns, rows)


def print_comparison(plan: Plan) -> None:
    """Compare a plan with the classical schedules of its problem."""
    objective, metrics, units = plan.problem.objective, plan.metrics, plan.problem.units
    # In lines of two, so that the table of a problem with layers fits 80 columns.
    columns = ("schedule", "span", "makespan", "bubble\nrate", "peak\nmemory", "fits", f"{objective} /\nplan")
    own = Baseline(
        plan.origin, metrics.span, metrics.makespan, metrics.bubble_rate, metrics.peak_memory, fits=True
    )
    time = quantities.timer(plan.objective, units)
    rows = (
        (
            row.name,
            time(row.span),
            time(row.makespan),
            quantities.percent(row.bubble_rate),
            quantities.memory(max(row.peak_memory), units),
            "yes" if row.fits else "no",
            f"{objective_value(objective, row) / plan.objective:.3f}" if plan.objective else "–",
        )
        for row in (own, *plan.baselines)
    )
    bound = quantities.time(metrics.lower_bound, quantities.stated(units))
    print_whole(table_of(f"lower bound of {objective}: {bound}", columns, rows))


def print_simulation(plan: Plan, found: Simulation) -> None:
    """Compare a plan with the classical schedules of its problem when durations vary."""
    objective, units = plan.problem.objective, plan.problem.units
    planned = quantities.time(plan.objective, quantities.stated(units))
    title = f"{objective} in {quantities.counted(found.scenarios, 'scenario')}; planned: {planned}"
    time = quantities.timer(plan.objective, units)
    own = found.spans.of(objective)[1]
    rows = []
    for name, spans, fits in (
        (plan.origin, found.spans, True),
        *((each.name, each.spans, each.fits) for each in found.baselines),
    ):
        expected, p95 = spans.of(objective)
        relative = f"{p95 / own:.3f}" if own else "–"
        rows.append((name, time(expected), time(p95), "yes" if fits else "no", relative))
    print_whole(table_of(title, ("schedule", "expected", "p95", "fits", "p95 / plan"), rows))


def first_actions(plan: Plan) -> str:
    """The beginning of every rank's actions, one line per rank."""
    lines = []
    for rank, actions in enumerate(plan.orders.all_text()[:MOST_RANKS]):
        more = " …" if len(actions) > FIRST_ACTIONS else ""
        lines.append(f"  rank {rank}: {' '.join(actions[:FIRST_ACTIONS])}{more}\n")
    if plan.problem.pp_degree > MOST_RANKS:
        lines.append(f"  and {plan.problem.pp_degree - MOST_RANKS} more ranks\n")
    return "".join(lines)


def cut_summary(plan: Plan) -> str:
    """The layers of every rank, and how much better any other cut could be; empty without layers."""
    problem, model = plan.problem, plan.problem.model
    if model is None:
        return ""
    units = quantities.stated(problem.units)
    loads = [problem.busy_time(rank) / problem.microbatches for rank in range(problem.pp_degree)]
    lines = []
    for rank, stages in enumerate(problem.placement.stages_of):
        parts = [
            _first_and_last(model.partition[stage]) + (" (recomputed)" if model.cut.recompute[stage] else "")
            for stage in stages
        ]
        lines.append(
            f"  rank {rank}: {' | '.join(parts)}; {quantities.time(loads[rank], units)} a microbatch"
        )
    if plan.cut is not None:
        bound = plan.cut.lower_bound
        lines.append(
            f"  placement {problem.placement.kind}; no cut of these layers has a {problem.objective} below "
            f"{quantities.time(bound, units)} (gap {quantities.percent(plan.cut.gap)})"
        )
        # In an even division every rank would have the mean.
        mean = problem.microbatches * sum(loads) / problem.pp_degree
        above = bound / mean - 1 if mean > 0 else 0.0
        if above >= UNEVEN:
            lines.append(
                "  these layers cannot be divided evenly: some rank has at least "
                f"{quantities.percent(above, 0)} more than the mean; finer layers (attention and MLP apart) "
                "may help"
            )
    return "".join(f"{line}\n" for line in lines)


def _first_and_last(names: Sequence[str]) -> str:
    return " … ".join(dict.fromkeys((names[0], names[-1]))) if names else "nothing"
