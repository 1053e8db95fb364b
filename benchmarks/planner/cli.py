"""Benchmarks of the planner: the commands and their arguments."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zbv_solver.commands.cli import useful_workers
from zbv_solver.documents.files import file_label, output, read_json

from benchmarks.findings import add_output, measure_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zbv_solver.search.options import SearchOptions

    from benchmarks.findings import Finding

EFFORTS = ("quick", "standard", "thorough")


def add_planner(commands: Any) -> None:
    """Add the benchmark of benchmark files."""
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
    command.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads of a search"
    )
    command.add_argument("--only", metavar="GLOB", help="only instances with a matching name")
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


def add_partitioning(commands: Any) -> None:
    """Add the benchmark of cuts and recomputation."""
    command = commands.add_parser(
        "partitioning",
        help="compare the cuts that zbv chooses with an even cut and GPipe's; compare recomputation",
        description="Plan models with the same search on an even cut, on GPipe's cut and on the cut that zbv "
        "chooses. Then plan a model within little memory with and without recomputation.",
    )
    _add_search_options(command)
    command.set_defaults(run=_partitioning)


def add_jitter(commands: Any) -> None:
    """Add the benchmark of plans whose durations vary."""
    command = commands.add_parser(
        "jitter",
        help="compare plans chosen with and without jitter, and the classical schedules, when durations vary",
        description="Plan problems with and without the option `jitter` (5 %% per action, 20 %% per "
        "transfer, quantile 0.95). Simulate both plans and the classical schedules in new scenarios.",
    )
    _add_search_options(command)
    command.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads of a search"
    )
    command.add_argument("--only", metavar="GLOB", help="only instances with a matching name")
    command.add_argument(
        "--scenarios", type=int, default=512, metavar="N", help="simulated iterations (default: 512)"
    )
    add_output(command)
    command.set_defaults(run=_jitter)


def add_packing(commands: Any) -> None:
    """Add the benchmark of packings."""
    command = commands.add_parser(
        "packing",
        help="pack global batches; compare with other methods and with what is usual",
        description="Pack batches of sequences for four replicas. Compare the planned steps with those of "
        "other methods, planned by the same search, and with equal tokens in the given order.",
    )
    _add_search_options(command)
    command.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads of a search"
    )
    command.add_argument("--only", metavar="GLOB", help="only batches with a matching name")
    add_output(command)
    command.set_defaults(run=_packing)


def add_layouts(commands: Any) -> None:
    """Add the benchmark of parallel layouts."""
    command = commands.add_parser(
        "layouts",
        help="search the layouts of a large cluster; compare small ones with planning every layout",
        description="Search the best layout of Llama 3.1 70B on 128 H100. Then compare the best layouts of "
        "random small clusters and models with those of planning every layout.",
    )
    command.add_argument("--cases", type=int, default=30, metavar="N", help="random cases (default: 30)")
    command.add_argument("--seed", type=int, default=0, help="seed of the random cases (default: 0)")
    add_output(command)
    command.set_defaults(run=_layouts)


def add_unequal(commands: Any) -> None:
    """Add the benchmark of microbatches that differ."""
    command = commands.add_parser(
        "unequal",
        help="plan problems whose microbatches differ; compare with bounds, baselines and the mean plan",
        description="Plan the problems of `lengths`, whose microbatches differ. Compare with proven bounds, "
        "with the classical schedules and DynaPipe's, and with a plan for the mean microbatch that the same "
        "search made.",
    )
    _add_search_options(command)
    command.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads of a search"
    )
    command.add_argument("--only", metavar="GLOB", help="only instances with a matching name")
    add_output(command)
    command.set_defaults(run=_unequal)


def add_unequal_exact(commands: Any) -> None:
    """Add the comparison of plans and bounds with optima of small problems."""
    command = commands.add_parser(
        "unequal-exact",
        help="compare plans and bounds of small problems whose microbatches differ with optima",
        description="Plan small problems with the sizes of `lengths`, and solve them by CP-SAT over "
        "all orders: is the plan or the bound to blame for the gap between them?",
    )
    _add_search_options(command)
    command.add_argument(
        "--workers", type=int, default=useful_workers(), metavar="N", help="threads of a search"
    )
    command.add_argument(
        "--share", type=float, default=0.6, metavar="S", help="memory limit; 1.0 is 1F1B's (default: 0.6)"
    )
    command.add_argument(
        "--proof", type=float, default=60.0, metavar="T", help="CP-SAT's deterministic time (default: 60)"
    )
    add_output(command)
    command.set_defaults(run=_unequal_exact)


def add_per_step(commands: Any) -> None:
    """Add the benchmark of planning every step."""
    command = commands.add_parser(
        "per-step",
        help="plan one step after another, each with other microbatches; compare with the quick effort",
        description="Plan the steps of a training run, each with other microbatches (8 ranks, 64 "
        "microbatches). Report the time to a first verified plan, and how the plans after a fifth of a "
        "second compare with those of the quick effort.",
    )
    command.add_argument("--steps", type=int, default=50, metavar="N", help="per run (default: 50)")
    command.add_argument("--only", metavar="GLOB", help="only runs with a matching name")
    add_output(command)
    command.set_defaults(run=_per_step)


def add_speed(commands: Any) -> None:
    """Add the benchmark of the kernels."""
    command = commands.add_parser("speed", help="count evaluations per second on one core")
    command.set_defaults(run=_speed)


def _add_search_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--effort", choices=EFFORTS, default="standard", help="default: standard")
    command.add_argument("--time-limit", type=float, metavar="SECONDS", help="per search (default: no limit)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the searches (default: 0)")


def _options(parsed: argparse.Namespace, **others: Any) -> SearchOptions:
    from zbv_solver.search.options import SearchOptions

    return SearchOptions(effort=parsed.effort, time_limit=parsed.time_limit, seed=parsed.seed, **others)


def _planner(parsed: argparse.Namespace) -> int:
    from zbv_solver.commands.messages import spinner

    from benchmarks.planner.report import report_json
    from benchmarks.planner.run import bench
    from benchmarks.planner.suite import GENERATED, generated, parse_suite, select

    options = _options(parsed, workers=parsed.workers, without=tuple(parsed.without))
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

    cut_table(_options(parsed), sys.stdout.write)
    recompute_table(_options(parsed), sys.stdout.write)
    return 0


def _jitter(parsed: argparse.Namespace) -> int:
    from zbv_solver.timing.step_times import MAX_SCENARIOS

    from benchmarks.findings import WrongInput
    from benchmarks.planner.jitter import instances, jitter_table

    if not 1 <= parsed.scenarios <= MAX_SCENARIOS:
        raise WrongInput(
            f"--scenarios: found {parsed.scenarios}; must be an integer from 1 to {MAX_SCENARIOS}."
        )
    options, chosen = _options(parsed, workers=parsed.workers), instances(parsed.only)

    def measure() -> Sequence[Finding]:
        return jitter_table(chosen, options, parsed.scenarios, sys.stdout.write)

    return measure_all([("jitter", f"{len(chosen)} instances", measure)], parsed.output)


def _per_step(parsed: argparse.Namespace) -> int:
    from benchmarks.findings import WrongInput
    from benchmarks.planner.per_step import LEAST_STEPS, per_step_table, runs

    if parsed.steps < LEAST_STEPS:
        raise WrongInput(f"--steps: found {parsed.steps}; must be at least {LEAST_STEPS}.")
    chosen = runs(parsed.only)

    def measure() -> Sequence[Finding]:
        return per_step_table(chosen, parsed.steps, sys.stdout.write)

    return measure_all([("per-step", f"{len(chosen)} runs of {parsed.steps} steps", measure)], parsed.output)


def _packing(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.packing import instances, packing_table

    options, chosen = _options(parsed, workers=parsed.workers), instances(parsed.only)

    def measure() -> Sequence[Finding]:
        return packing_table(chosen, options, sys.stdout.write)

    return measure_all([("packing", f"{len(chosen)} batches", measure)], parsed.output)


def _layouts(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.layouts import layouts_table

    def measure() -> Sequence[Finding]:
        return layouts_table(parsed.cases, parsed.seed, sys.stdout.write)

    return measure_all([("layouts", f"{parsed.cases} random cases", measure)], parsed.output)


def _unequal(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.unequal import instances, unequal_table

    options, chosen = _options(parsed, workers=parsed.workers), instances(parsed.only)

    def measure() -> Sequence[Finding]:
        return unequal_table(chosen, options, sys.stdout.write)

    return measure_all([("unequal", f"{len(chosen)} instances", measure)], parsed.output)


def _unequal_exact(parsed: argparse.Namespace) -> int:
    from benchmarks.planner.exact_cases import exact_instances, exact_table

    options, chosen = _options(parsed, workers=parsed.workers), list(exact_instances(parsed.share))

    def measure() -> Sequence[Finding]:
        return exact_table(chosen, parsed.proof, options, sys.stdout.write)

    return measure_all([("unequal-exact", f"{len(chosen)} instances", measure)], parsed.output)


def _speed(_parsed: argparse.Namespace) -> int:
    from benchmarks.planner.speed import speed_table

    sys.stdout.write(speed_table())
    return 0
