"""The tables of ``zbv layout``: layouts, what the best step consists of, and what changes would do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.table import Table
from zbv_models.estimate.model_layers import parameters_of, trained_parameters_of, training_text
from zbv_models.layouts.answer import (
    composition,
    costs_of,
    memory_of_ranks,
    recomputation,
    reserved_memory,
    utilisation,
)
from zbv_models.layouts.cluster import AnyCluster
from zbv_models.layouts.compared_layout import ComparedLayout
from zbv_models.layouts.estimated_layout import PlannedLayout
from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.executor_search import ExecutorLayout
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import Ranking
from zbv_models.layouts.sensitivity import MOST_PLANS, Outcome

from zbv_solver.commands.cut_score import with_group
from zbv_solver.commands.model_flags import FLAGS
from zbv_solver.export.quantities import (
    SECONDS,
    counted,
    figure,
    fixed,
    gigabytes,
    percent,
    relative,
    time,
    timer,
)
from zbv_solver.export.timeline import pair_savings

ROWS = (
    *(name.replace("_", " ") for name in FLAGS[:5]),
    *("stages", "microbatches", "ZeRO stage", "recompute", "placement"),
    *("step", "lower bound", "model FLOPs utilisation", "tensors", "reserved by PyTorch"),
)

EXECUTOR_ROWS = ("executor", "schedule", "step in a free order")
COPY_ROWS = ("forwards copied to the host", "most copies of a rank", "step without copies")
PAIR_ROWS = ("forwards in pairs", "step without pairs")
LEAST_SHARE = 5e-5
"""Parts below this share of the step are not shown."""
MOST_RANKS = 16
"""Rows of the table of memory."""
SHORT = {
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "data_parallel": "dp",
    "pipeline_parallel": "pp",
    "microbatch_size": "microbatch",
    "zero_stage": "ZeRO",
}


def layout_table(ranking: Ranking, request: Request) -> Table:
    """A column per layout, best first."""
    table = Table(title=_title(request.cluster), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    has_executors = any(isinstance(each, ExecutorLayout) for each in ranking.best)
    rows, columns = ROWS + (("groups of ranks",) if len(request.cluster.groups) > 1 else ()), []
    rows += EXECUTOR_ROWS if has_executors else ()
    setting = request.setting
    has_pairs, has_copies = setting.training.pairs != "none", setting.copies != "none"
    known = [each for each in ranking.best if isinstance(each, ComparedLayout)]
    baselines = tuple(dict.fromkeys(row.name for each in known for row in each.baselines))
    rows += (*PAIR_ROWS, *(f"step of {name}" for name in baselines)) if has_pairs else ()
    rows += COPY_ROWS if has_copies else ()
    seconds = timer(ranking.best[0].step_time, SECONDS)
    for each in ranking.best:
        table.add_column(justify="right")
        layout, placement = each.layout, each.plan.problem.placement
        columns.append(
            [
                *(str(getattr(layout, name)) for name in FLAGS[:5]),
                f"{placement.n_stages}, {placement.kind}",
                f"{layout.microbatches} of {layout.microbatch_size}",
                str(layout.zero_stage),
                _recomputation_text(each),
                layout.placement,
                seconds(each.step_time),
                seconds(each.lower_bound),
                percent(utilisation(each, request), 1),
                gigabytes(max(each.plan.metrics.peak_memory)),
                gigabytes(reserved_memory(each)),
                *([_ranks_of_groups(layout)] if layout.groups else []),
                *(_executor_cells(each) if has_executors else ()),
                *(_pair_cells(each, baselines) if has_pairs and isinstance(each, ComparedLayout) else ()),
                *(_copy_cells(each) if has_copies and isinstance(each, ComparedLayout) else ()),
            ]
        )
    for name, values in zip(rows, zip(*columns, strict=True), strict=True):
        table.add_row(name, *values)
    return table


def _title(cluster: AnyCluster) -> str:
    nodes = [
        f"{number}: {counted(each.nodes, 'node')} of {each.gpus_per_node} {each.preset or 'devices'}"
        for number, each in enumerate(cluster.groups)
    ]
    if len(nodes) == 1:
        (group,) = cluster.groups
        return f"layouts on {counted(group.nodes, 'node')} of {counted(group.gpus_per_node, 'device')}"
    return f"layouts on groups {', '.join(nodes)}"


def _ranks_of_groups(layout: Layout) -> str:
    """The group of every pipeline rank, runs of equal ones together."""
    return ", ".join(f"{len([*same])} in {group}" for group, same in groupby(layout.groups))


def origins_text(ranking: Ranking) -> str:
    """Which costs of the best layout were measured."""
    said = [
        f"{origin}: {', '.join(f'{count} x {name}' for name, count in kinds.items())}"
        for origin, kinds in costs_of(ranking.best[0]).items()
        if kinds
    ]
    return f"Costs of the best layout: {'; '.join(said)}."


def _recomputation_text(planned: PlannedLayout) -> str:
    """What the plan recomputes, in words."""
    layout, kind = planned.layout, recomputation(planned)
    if layout.recompute_layers is not None:
        return f"{kind}, first {layout.recompute_layers} of a stage"
    modules = ", ".join(layout.recompute_modules)
    return f"{kind}: {modules}" if modules else kind


def _executor_cells(planned: PlannedLayout) -> tuple[str, str, str]:
    """Executor, schedule, and the step in a free order with how much shorter it is."""
    if not isinstance(planned, ExecutorLayout):
        return FREE, "searched", time(planned.step_time, SECONDS)
    name = with_group(planned.best.schedule)
    if planned.free is None:
        return planned.executor, name, "does not fit"
    gain = 1 - planned.free.step_time / planned.step_time
    shorter = f" (−{percent(gain, 1)})" if gain >= 0.0005 else ""
    return planned.executor, name, f"{time(planned.free.step_time, SECONDS)}{shorter}"


def _pair_cells(planned: ComparedLayout, baselines: tuple[str, ...]) -> Iterator[str]:
    """Forwards in pairs, and the steps that the plan is compared with: how much longer they are."""
    pairs = pair_savings(planned.plan)
    yield f"{figure(pairs.paired, 12)} of {figure(pairs.forwards, 12)}" if pairs else "none"
    steps = {row.name: row for row in planned.baselines}
    yield _without(planned.without_pairs, planned)
    for name in baselines:
        row = steps.get(name)
        too_large = "" if row is None or row.fits else ", does not fit"
        yield "–" if row is None else _longer(row.step_time, planned) + too_large


def _copy_cells(planned: ComparedLayout) -> tuple[str, str, str]:
    """Forwards that are copied, the host's memory, and the step without copies."""
    problem = planned.plan.problem
    of = problem.n_stages * problem.microbatches
    return (
        f"{figure(planned.copied, 12)} of {figure(of, 12)}",
        gigabytes(max(planned.on_host)),
        _without(planned.without_copies, planned),
    )


def _without(alone: PlannedLayout | None, planned: PlannedLayout) -> str:
    return "does not fit" if alone is None else _longer(alone.step_time, planned)


def _longer(step: float, planned: PlannedLayout) -> str:
    return f"{time(step, SECONDS)} ({relative(step, planned.step_time)})"


def origin_text(request: Request) -> str:
    """Where the model's sizes come from, if its type is not known."""
    origin = request.config.model.origin
    return "" if origin is None else origin.text


def trained_text(request: Request) -> str:
    """How many parameters train, if some do not."""
    model = request.config.model
    parameters, trained = parameters_of(model).total, trained_parameters_of(model).total
    if trained == parameters:
        return ""
    counts = f"{figure(trained / 1e6, 4)} M of {figure(parameters / 1e6, 4)} M"
    return f"{counts} parameters train{training_text(model)}. "


def memory_text(cluster: AnyCluster) -> str:
    """What is compared with the size of a device."""
    shares = ", ".join(dict.fromkeys(f"{each.allocator_share:.3g}" for each in cluster.groups))
    return (
        f"PyTorch's allocator is taken to reserve {shares} times what tensors need, the median of published "
        f"runs; allocator_share of the cluster changes it."
    )


def verdict(ranking: Ranking) -> str:
    """How many layouts were planned and ruled out, and what is proved."""
    others = f"{figure(ranking.unsettled, 12)} others were planned or ruled out"
    open_ones = f" The search ended before {others}." if ranking.unsettled else ""
    return (
        f"{counted(ranking.considered, 'layout')}: {figure(ranking.planned, 12)} planned, "
        f"{figure(ranking.pruned, 12)} ruled out by bounds "
        f"({percent(ranking.pruned / ranking.considered, 1)}).{open_ones} No layout has a step below "
        f"{time(ranking.no_layout_below, SECONDS)}."
    )


def composition_table(planned: PlannedLayout) -> Table:
    """The parts of a step, and their shares."""
    table = Table(title="the best step consists of", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    seconds = timer(planned.step_time, SECONDS)
    for name, length in composition(planned).items():
        share = length / planned.step_time
        if share >= LEAST_SHARE:
            table.add_row(name.replace("_", " "), seconds(length), percent(share, 1))
    return table


def rank_memory_table(planned: PlannedLayout) -> Table:
    """What the devices hold: of every rank, or of the fullest ones."""
    ranks = memory_of_ranks(planned)
    sums = [sum(each.values()) for each in ranks]
    shown = sorted(sorted(range(len(ranks)), key=lambda rank: -sums[rank])[:MOST_RANKS])
    which = "of every rank" if len(shown) == len(ranks) else f"of the {MOST_RANKS} fullest ranks"
    table = Table(title=f"tensors on a device {which} at its peak, in GB", title_justify="left")
    for name in ("rank", *ranks[0], "sum"):
        table.add_column(name, justify="right")
    for rank in shown:
        sizes = (*ranks[rank].values(), sums[rank])
        table.add_row(str(rank), *(fixed(size / 1e9, 2) for size in sizes))
    return table


def sensitivity_table(ranking: Ranking, outcomes: list[Outcome]) -> Table:
    """A row per change."""
    base = ranking.best[0]
    table = Table(title="if these were different", title_justify="left")
    for name in ("change", "step of the best layout", "best layout then", "its step"):
        table.add_column(name, justify="left" if name in ("change", "best layout then") else "right")
    seconds = timer(base.step_time, SECONDS)
    for each in outcomes:
        step = "does not fit" if each.step_time is None else seconds(each.step_time)
        if each.best is None or each.best_step_time is None:
            table.add_row(change_text(each), step, "none fits", "")
            continue
        is_same = each.best_step_time == each.step_time
        layout = "the same" if is_same else _difference(each.best, base.layout)
        mark = "" if each.is_proved else " *"
        table.add_row(change_text(each), step, layout, f"{seconds(each.best_step_time)}{mark}")
    return table


def sensitivity_note(outcomes: list[Outcome]) -> str:
    """What the table compares."""
    return (
        f"Among {max(each.among for each in outcomes)} layouts: those with the shortest steps or least "
        "bounds, and some that lack little memory. For each change, at most "
        f"{MOST_PLANS} pipelines are planned (* a layout that was not planned may be better)."
    )


def change_text(change: Outcome) -> str:
    """A change in a few words."""
    name = {"device_flops": "device FLOP/s"}.get(change.of, change.of.replace("_", " "))
    return f"{name} x {change.factor:g}"


def _difference(layout: Layout, before: Layout) -> str:
    """The parts of a layout that differ from another one's."""
    parts = [
        f"{short} {getattr(layout, name)}"
        for name, short in SHORT.items()
        if getattr(layout, name) != getattr(before, name)
    ]
    if layout.placement != before.placement:
        parts.append(layout.placement)
    return ", ".join(parts) or "the same"
