"""Benchmarks of the planner: the commands and their arguments."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zbv_solver.commands.cli import useful_workers
from zbv_solver.documents.files import file_label, output, read_json

from benchmarks.findings import Finding, WrongInput, add_output, at_least, at_most, matching, measure_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zbv_solver.search.options import SearchOptions

LARGE = ("llama-3.1-70b", 16, 1024)
"""The benchmark of layouts: a model, the nodes of 8 H100 that train it, and sequences per step."""
MOST_SECONDS, LEAST_PRUNED_PERCENT = 30.0, 90.0


def add_planner(commands: Any) -> None:
    """Add the benchmarks of the planner."""
    command = commands.add_parser(
        "planner",
        help="plan the problems of benchmark files; compare with bounds, targets and other planners",
        description="Plan every problem of the files. Report each plan's value, its proven lower bound, the "
        "gap between them, and how the plan compares with other planners and with targets.",
    )
    command.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="benchmark file (JSON), or -; or the problems of the benchmark `unequal` or `jitter`",
    )
    _add_search_options(command)
    _add_workers_and_only(command)
    command.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="STAGE",
        help="skip this phase of the search; may be repeated",
    )
    command.add_argument(
        "--ablate", action="store_true", help="run again without each mechanism, to show what it adds"
    )
    command.add_argument(
        "--json", metavar="FILE", help="also write all results, with the progress of every search"
    )
    command.set_defaults(run=_planner)
    _add_tables(commands)


def _add_tables(commands: Any) -> None:
    """Add the benchmarks that print their own tables."""
    command = commands.add_parser(
        "partitioning",
        help="compare the cuts that zbv chooses with an even cut and GPipe's; compare recomputation",
    )
    _add_search_options(command)
    command.set_defaults(run=_partitioning)
    for run, text in (
        (_jitter, "compare plans chosen with and without jitter, and the classical schedules"),
        (_packing, "pack global batches; compare with other methods and with what is usual"),
        (
            _unequal,
            "plan problems whose microbatches differ; compare with bounds, baselines and the mean plan",
        ),
    ):
        command = commands.add_parser(run.__name__.removeprefix("_"), help=text)
        _add_search_options(command)
        _add_workers_and_only(command)
        if run is _jitter:
            command.add_argument(
                "--scenarios", type=int, default=512, metavar="N", help="simulated iterations (default: 512)"
            )
        add_output(command)
        command.set_defaults(run=run)
    command = commands.add_parser(
        "per-step",
        help="plan one step after another, each with other microbatches; compare with the quick effort",
    )
    command.add_argument("--steps", type=int, default=50, metavar="N", help="per run (default: 50)")
    command.add_argument("--only", metavar="GLOB", help="only runs with a matching name")
    add_output(command)
    command.set_defaults(run=_per_step)
    command = commands.add_parser("layouts", help="search the layouts of Llama 3.1 70B on 128 H100")
    add_output(command)
    command.set_defaults(run=_layouts)


def _add_search_options(command: argparse.ArgumentParser) -> None:
    efforts = ("quick", "standard", "thorough")
    command.add_argument("--effort", choices=efforts, default="standard", help="default: standard")
    command.add_argument("--time-limit", type=float, metavar="SECONDS", help="per search (default: no limit)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the searches (default: 0)")


def _add_workers_and_only(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads of a search"
    )
    command.add_argument("--only", metavar="GLOB", help="only problems with a matching name")


def _options(parsed: argparse.Namespace, **others: Any) -> SearchOptions:
    from zbv_solver.search.options import SearchOptions

    workers = getattr(parsed, "workers", 1)
    return SearchOptions(
        effort=parsed.effort, time_limit=parsed.time_limit, seed=parsed.seed, workers=workers, **others
    )


def _planner(parsed: argparse.Namespace) -> int:
    from zbv_solver.commands.messages import spinner

    from benchmarks.planner.report import report_json
    from benchmarks.planner.run import GENERATED, bench, generated
    from benchmarks.planner.suite import parse_suite, select

    options = _options(parsed, without=tuple(parsed.without))
    suites = [
        generated(path) if path in GENERATED else parse_suite(read_json(path), file_label(path))
        for path in parsed.files
    ]
    instances = select(suites, parsed.only)
    table = sys.stderr if parsed.json == "-" else sys.stdout
    with nullcontext(lambda text: None) if parsed.json is None else output(parsed.json) as write:
        report = bench(instances, options, ablate=parsed.ablate, out=table, spinner=spinner)
        write(json.dumps(report_json(report), indent=1, allow_nan=False) + "\n")
    if report.interrupted:
        raise KeyboardInterrupt
    return 0


def _partitioning(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.partitioning import cut_table, recompute_table

    cut_table(_options(parsed), _write)
    recompute_table(_options(parsed), _write)
    return 0


def _jitter(parsed: argparse.Namespace) -> int:
    from zbv_solver.timing.step_times import MAX_SCENARIOS

    from benchmarks.planner.jitter import instances, jitter_table

    if not 1 <= parsed.scenarios <= MAX_SCENARIOS:
        raise WrongInput(
            f"--scenarios: found {parsed.scenarios}; must be an integer from 1 to {MAX_SCENARIOS}."
        )
    options, chosen = _options(parsed), matching(instances(), parsed.only, lambda pair: pair[0])
    return _measured(parsed, chosen, lambda: jitter_table(chosen, options, parsed.scenarios, _write))


def _packing(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.lengths import packing_instances
    from benchmarks.planner.packing import packing_table

    options, chosen = _options(parsed), matching(packing_instances(), parsed.only, lambda each: each.name)
    return _measured(parsed, chosen, lambda: packing_table(chosen, options, _write))


def _unequal(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.lengths import instances
    from benchmarks.planner.unequal import unequal_table

    options, chosen = _options(parsed), matching(instances(), parsed.only, lambda each: each.name)
    return _measured(parsed, chosen, lambda: unequal_table(chosen, options, _write))


def _per_step(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.per_step import LEAST_STEPS, per_step_table, runs

    if parsed.steps < LEAST_STEPS:
        raise WrongInput(f"--steps: found {parsed.steps}; must be at least {LEAST_STEPS}.")
    chosen = matching(runs(), parsed.only, lambda run: run.name)
    return _measured(parsed, chosen, lambda: per_step_table(chosen, parsed.steps, _write))


def _layouts(parsed: argparse.Namespace) -> int:
    return measure_all([("layouts", "all layouts of a large cluster", search_layouts)], parsed.output)


def search_layouts() -> list[Finding]:
    """Search the layouts of a large cluster: how long it takes, and how many layouts bounds rule out."""
    import time

    from zbv_models.layouts.cluster import parse_cluster
    from zbv_models.layouts.request import parse_request
    from zbv_models.layouts.search import best_layouts

    name, nodes, batch = LARGE
    cluster = parse_cluster({"nodes": nodes, "gpus_per_node": 8, "device": "h100"})
    request = parse_request({"presets": [name], "global_batch": batch}, cluster)
    began = time.perf_counter()
    ranking = best_layouts(request.layouts, request.setting, workers=useful_workers())
    seconds = time.perf_counter() - began
    best = ranking.best[0]
    _write(f"{name}, {cluster.devices} devices: {best.layout}\n")
    _write(f"  step {best.step_time:.4g} s, no layout below {ranking.no_layout_below:.4g} s\n")
    pruned = 100 * ranking.pruned / ranking.considered
    return [
        Finding("seconds, all layouts", seconds, "s", at_most(MOST_SECONDS)),
        Finding("  layouts ruled out", pruned, "%", at_least(LEAST_PRUNED_PERCENT)),
    ]


def _measured(
    parsed: argparse.Namespace, chosen: Sequence[Any], measure: Callable[[], Sequence[Finding]]
) -> int:
    return measure_all([(parsed.benchmark, f"{len(chosen)} problems", measure)], parsed.output)


def _write(text: str) -> None:
    """Write at once, because a benchmark takes long."""
    sys.stdout.write(text)
    sys.stdout.flush()
