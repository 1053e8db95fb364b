"""``zbv cut --layout``: what a given cut achieves, as text and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from zbv_models.fixed_orders.best_cut import BestCut
from zbv_models.fixed_orders.executor_cut import EXECUTORS, stage_letters
from zbv_models.fixed_orders.megatron_layout import write_layout
from zbv_models.fixed_orders.schedules import Schedule
from zbv_models.fixed_orders.score import Score

from zbv_solver.commands.messages import table_of
from zbv_solver.documents.files import plain
from zbv_solver.export import quantities
from zbv_solver.plans.plan import gap_of

MOST_NAMED = 3
"""Stages whose share of the objective a summary names."""
NAMED_SHARE = 0.05
"""A smaller share is not named."""


def score_json(score: Score) -> dict[str, Any]:
    """A score as a JSON document; docs/formats.md describes it."""
    problem, timing = score.problem, score.timing
    placement, limits = problem.placement, problem.memory.limit
    busy = [float(sum(score.busy[stage] for stage in stages)) for stages in placement.stages_of]
    return {
        "executor": score.executor,
        "layout": write_layout(score.stages),
        **score.schedule.document(),
        "recompute": score.recompute,
        "recompute_layers": score.recompute_layers,
        "recompute_group": score.recompute_group,
        "objective": score.objective,
        "span": timing.span,
        "makespan": timing.makespan,
        "bubble_rate": timing.bubble_rate,
        "lower_bound": score.lower_bound,
        "fits": not score.too_full,
        "bottleneck": {
            "stage": score.bottleneck,
            "rank": placement.rank_of[score.bottleneck],
            "share": float(score.critical[score.bottleneck]),
        },
        "ranks": [
            {
                "stages": list(placement.stages_of[rank]),
                "busy": busy[rank],
                "waiting": max(0.0, score.objective - busy[rank]),
                "peak_memory": timing.peak_memory[rank],
                "limit": None if limits is None else plain(limits[rank]),
                "fits": rank not in score.too_full,
            }
            for rank in range(problem.pp_degree)
        ],
        "stages": [
            {
                "rank": placement.rank_of[stage],
                "modules": score.stages[stage],
                "layers": [] if problem.model is None else list(problem.model.partition[stage]),
                "busy": float(score.busy[stage]),
                "share": float(score.critical[stage]),
            }
            for stage in range(problem.n_stages)
        ],
        "best_of_schedule": _best_json(score, score.same),
        "best": _best_json(score, score.overall),
        "settings": score.settings,
    }


def _best_json(score: Score, best: BestCut | None) -> dict[str, Any] | None:
    if best is None:
        return None
    return {
        **best.results[0].document(),
        "layout": write_layout(stage_letters(best.problem, score.modules)),
        "objective": best.objective,
        "lower_bound": best.lower_bound,
        "gain": score.gain(best),
    }


def score_table(score: Score) -> Table:
    """The ranks: their stages, how long they work and wait, and their memory."""
    problem, units = score.problem, score.problem.units
    limits, rows = problem.memory.limit, []
    time = quantities.timer(score.objective, units)
    for rank, stages in enumerate(problem.placement.stages_of):
        busy = float(sum(score.busy[stage] for stage in stages))
        full = " does not fit" if rank in score.too_full else ""
        rows.append(
            (
                str(rank),
                " ".join(write_layout((score.stages[stage],)) or "–" for stage in stages),
                time(busy),
                quantities.percent(max(0.0, 1 - busy / score.objective)) if score.objective else "",
                quantities.memory(score.timing.peak_memory[rank], units) + full,
                "" if limits is None else quantities.memory(limits[rank], units),
            )
        )
    columns = ("rank", "stages", "busy", "waiting", "memory", "limit")
    return table_of(f"the layout under {schedule_name(score)}, by rank", columns, rows)


def schedule_name(score: Score) -> str:
    """The schedule with its stages, its group, and what is recomputed."""
    again = _again(score.recompute, score.recompute_layers, score.recompute_group)
    return f"{with_group(score.schedule)}{again}"


def with_group(schedule: Schedule) -> str:
    """The name of a schedule with the size of its groups."""
    return schedule.name if schedule.group is None else f"{schedule.name}, groups of {schedule.group}"


def _again(recompute: str, layers: int | None, group: int | None = None) -> str:
    """What is recomputed."""
    if recompute == "block":
        first = "transformer layer" if layers == 1 else f"{layers} transformer layers"
        return f", the first {first} of every stage recomputed"
    groups = "" if group is None else f" in groups of {group} layers"
    return f", all stages recomputed{groups}" if recompute == "all" else ""


def score_summary(score: Score) -> str:
    """A few sentences: the step, memory, the bottleneck, the bound and what better cuts gain."""
    problem, units = score.problem, quantities.stated(score.problem.units)
    objective = quantities.time(score.objective, units)
    lines = [
        f"{write_layout(score.stages)}: {problem.objective} {objective}. "
        f"{EXECUTORS[score.executor]} takes it."
    ]
    if score.too_full:
        ranks = ", ".join(map(str, score.too_full))
        lines.append(
            f"It does not fit the memory of {'ranks' if len(score.too_full) > 1 else 'rank'} {ranks}."
        )
    elif problem.memory.limit is not None:
        lines.append("It fits the memory of all ranks.")
    lines += [_bottleneck(score), *_bound(score), *_better(score)]
    lines += ["", score.settings.rstrip()] if score.settings else []
    lines += [score.remark] if score.remark else []
    return "\n".join(lines) + "\n"


def _bottleneck(score: Score) -> str:
    shares, rank_of = score.critical, score.problem.placement.rank_of
    ranked = sorted(range(len(shares)), key=lambda stage: -shares[stage])
    named = [stage for stage in ranked[:MOST_NAMED] if shares[stage] >= NAMED_SHARE] or ranked[:1]
    parts = [
        f"{quantities.percent(float(shares[stage]), 0)} stage {stage} on rank {rank_of[stage]}"
        for stage in named
    ]
    rest = 1 - float(shares.sum())
    parts += [f"{quantities.percent(rest, 0)} transfers"] if rest >= NAMED_SHARE else []
    return (
        f"Stage {score.bottleneck} is the bottleneck. The {score.problem.objective} is determined by: "
        f"{', '.join(parts)}."
    )


def _bound(score: Score) -> list[str]:
    gap = gap_of(score.objective, score.lower_bound)
    bound = quantities.time(score.lower_bound, quantities.stated(score.problem.units))
    if gap == 0:
        return ["It is proved that no cut under this schedule is shorter."]
    return [
        f"No cut under this schedule is shorter than {bound}: at most "
        f"{quantities.percent(gap / (1 + gap), 1)} can be gained."
    ]


def _better(score: Score) -> list[str]:
    if score.same is None and score.overall is None:
        return ["No cut is known that fits the memory."]
    lines, units = [], quantities.stated(score.problem.units)
    for best, what in ((score.same, "under this schedule"), (score.overall, "of all schedules")):
        if best is None or (what != "under this schedule" and best is score.same):
            continue
        gain, found = score.gain(best), quantities.time(best.objective, units)
        layout = write_layout(stage_letters(best.problem, score.modules))
        under = what if best is score.same else f"{what} ({with_group(best.schedule)})"
        again = _again(best.results[0].recompute, best.results[0].recompute_layers)
        short = (
            "fits" if gain is None else f"{quantities.percent(gain, 1)} shorter" if gain else "not shorter"
        )
        lines.append(f"The best cut {under} is {layout}{again}: {found}, {short}.")
    return lines
