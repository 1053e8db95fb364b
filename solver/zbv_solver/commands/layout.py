"""``zbv layout``: the parallel layout that trains a model fastest on a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from zbv_solver.commands.interrupt import interruptible, terminated_like_interrupted
from zbv_solver.commands.layout_flags import FLAGS
from zbv_solver.commands.messages import flag_of
from zbv_solver.commands.searching import spinner
from zbv_solver.documents.files import file_label, load, output, read_json
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.layouts.answer import ranking_json, recomputation, utilisation
from zbv_solver.layouts.cluster import parse_cluster
from zbv_solver.layouts.enumeration import ZERO_STAGES
from zbv_solver.layouts.executor_answer import free_step, schedule_name
from zbv_solver.layouts.executor_layouts import ExecutorLayout, executor_layouts
from zbv_solver.layouts.executor_rules import FREE
from zbv_solver.layouts.layout import Fixed
from zbv_solver.layouts.request import Request, parse_request
from zbv_solver.layouts.search import PlannedLayout, Ranking, best_layouts
from zbv_solver.search.options import SearchOptions

ROWS = (
    *(name.replace("_", " ") for name in FLAGS[:5]),
    *("stages", "microbatches", "ZeRO stage", "recompute", "placement"),
    *("step", "lower bound", "model FLOPs utilisation", "peak memory"),
)

EXECUTOR_ROWS = ("executor", "schedule", "step in a free order")


def layout(arguments: argparse.Namespace) -> None:
    """Search the best layouts; print a table, and write them if asked."""
    request = _request(arguments)
    layouts, setting = request.layouts, request.setting
    options = None if arguments.effort is None else SearchOptions(arguments.effort, workers=arguments.workers)

    def search(stop: Callable[[], bool]) -> Ranking:
        if arguments.executor == FREE:
            return best_layouts(layouts, setting, arguments.top, options, stop)
        try:
            return executor_layouts(layouts, setting, arguments.executor, arguments.top, options, stop)
        except InvalidInput as error:
            raise error.found_in("--executor") from None

    with terminated_like_interrupted(), spinner("searching layouts"):
        if arguments.output is None:
            ranking = interruptible(search)
        else:
            with output(arguments.output) as write_text:
                ranking = interruptible(search)
                write_text(json.dumps(ranking_json(ranking, request)) + "\n")
    console = Console(stderr=arguments.output == "-")
    console.print(_table(ranking, request))
    console.print(_verdict(ranking), highlight=False)
    best = ranking.best[0]
    if isinstance(best, ExecutorLayout):
        console.print(f"\n{(best.settings or best.remark).rstrip()}", markup=False, soft_wrap=True)


def _request(arguments: argparse.Namespace) -> Request:
    for flag, value in _given_numbers(arguments):
        is_stage = flag == "--zero-stage"
        if value < (0 if is_stage else 1):
            rule = "must be at least 0" if is_stage else "must be at least 1"
            raise InvalidInput([Issue("", f"found {value}; {rule}.", flag)])
        if is_stage and value > max(ZERO_STAGES):
            raise InvalidInput([Issue("", f"found {value}; must be at most {max(ZERO_STAGES)}.", flag)])
    if arguments.model is None and not arguments.preset:
        raise InvalidInput([Issue("", "found neither; give one of them.", "model, --preset")])
    cluster = load(arguments.cluster, parse_cluster)
    fixed = Fixed(**{name: getattr(arguments, name) for name in FLAGS})
    document = {} if arguments.model is None else read_json(arguments.model)
    try:
        return parse_request(
            document,
            cluster,
            fixed,
            tuple(arguments.preset),
            global_batch=arguments.global_batch,
            sequence_length=arguments.sequence_length,
        )
    except InvalidInput as error:
        issues = [_named(issue, arguments.model) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None


def _given_numbers(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    values = [(flag_of(name), getattr(arguments, name)) for name in ("top", *FLAGS)]
    return [(flag, value) for flag, value in values if isinstance(value, int)]


def _named(issue: Issue, path: str | None) -> Issue:
    """An issue that names the file, or the flag if there is none."""
    if issue.source or path is not None:
        return issue if issue.source or path is None else replace(issue, source=file_label(path))
    flags = {"/model": "--preset", "/global_batch": "--global-batch", "/model/sequence": "--sequence-length"}
    return Issue("", issue.detail, flags[issue.pointer]) if issue.pointer in flags else issue


def _table(ranking: Ranking, request: Request) -> Table:
    """A column per layout, best first."""
    cluster = request.cluster
    title = f"layouts on {cluster.nodes} nodes of {cluster.gpus_per_node} devices"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    has_executors = any(isinstance(each, ExecutorLayout) for each in ranking.best)
    rows, columns = ROWS + (EXECUTOR_ROWS if has_executors else ()), []
    for each in ranking.best:
        table.add_column(justify="right")
        layout, placement = each.layout, each.plan.problem.placement
        columns.append(
            [
                *(str(getattr(layout, name)) for name in FLAGS[:5]),
                f"{placement.n_stages}, {placement.kind}",
                f"{layout.microbatches} of {layout.microbatch_size}",
                str(layout.zero_stage),
                recomputation(each),
                layout.placement,
                f"{each.step_time:.4g} s",
                f"{each.lower_bound:.4g} s",
                f"{utilisation(each, request):.1%}",
                f"{max(each.plan.metrics.peak_memory) / 1e9:.3g} GB",
                *(_executor_cells(each) if has_executors else ()),
            ]
        )
    for name, values in zip(rows, zip(*columns, strict=True), strict=True):
        table.add_row(name, *values)
    return table


def _executor_cells(planned: PlannedLayout) -> tuple[str, str, str]:
    name = planned.executor if isinstance(planned, ExecutorLayout) else FREE
    return name, schedule_name(planned), free_step(planned)


def _verdict(ranking: Ranking) -> str:
    return (
        f"{ranking.considered:,} layouts: {ranking.planned:,} planned, {ranking.pruned:,} ruled out by "
        f"bounds ({ranking.pruned / ranking.considered:.1%}). No layout has a step below "
        f"{ranking.no_layout_below:.4g} s."
    )
