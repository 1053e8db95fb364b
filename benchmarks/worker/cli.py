"""``zbv-worker bench``: its options, its table and its exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_worker.commands.arguments import json_output, positive

if TYPE_CHECKING:  # torch takes seconds to import; --help must not
    from benchmarks.worker.findings import Finding

NAMES = ("overhead", "gpt", "split", "memory", "rehearse")

_EXAMPLES = """\
examples:
  zbv-worker bench all -o bench.json
  zbv-worker bench gpt --rehearse-pp 8
  zbv-worker bench memory --workload benchmarks/worker/memory-wide.json

exit status: 0 every target was met; 1 one was missed (by how much is said), or the measurement failed;
2 wrong input.
"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="measure overhead, speed, split, memory and rehearsals against targets",
        description="Measure on this machine, with two ranks or more on its CPU cores. overhead: CPU time "
        "per action, ours and PyTorch's runtime. gpt: a GPT by our plan and by PyTorch's schedules in turns. "
        "split: I + W against the fused backward. memory: peaks of real steps against the plan's. "
        "rehearse: a rehearsal's time against the planned. Times are told as ratios of what was measured in "
        "turns; on a busy machine they scatter more, and the intervals say so.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=(*NAMES, "all"), help="what to measure")
    bench.add_argument(
        "--workload", metavar="FILE", type=Path, help="replace fields of the workload (see benchmarks/worker)"
    )
    bench.add_argument("--rounds", type=positive, metavar="N", help="measured rounds (gpt, overhead, split)")
    bench.add_argument(
        "--rehearse-pp",
        type=positive,
        metavar="P",
        help="gpt: also rehearse the schedules at P ranks, with sleeps in place of compute",
    )
    bench.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the numbers here, as JSON")


def execute(parsed: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status.

    Raises
    ------
    InvalidRun
        For a workload that does not fit.
    WorkerError
        When a measurement fails.
    """
    from rich.console import Console
    from zbv_solver.errors import InfeasibleMemory, InvalidInput
    from zbv_worker.errors import InvalidRun

    from benchmarks.worker.findings import findings_json, missed, table

    names = NAMES if parsed.name == "all" else (parsed.name,)
    if parsed.workload is not None and len(names) > 1:
        raise InvalidRun("--workload: found it with `all`; a workload belongs to one measurement. Name that.")
    _require_planner()
    jobs = [(name, _job(name, parsed)) for name in names]  # wrong input is said before anything is measured
    out, report, late = Console(), {}, []
    with json_output("--output", parsed.output) as write:
        for name, measure in jobs:
            load = os.getloadavg()[0]
            try:
                found = measure()
            except (InvalidInput, InfeasibleMemory) as error:  # of the planner: such a workload has no plan
                raise InvalidRun(f"bench {name}: {error}") from error
            report[name] = {"load_before": load, "cores": os.cpu_count(), "findings": findings_json(found)}
            out.print(table(f"{name} (load {load:.1f} on {os.cpu_count()} cores before it)", found))
            late += missed(found)
            write(report)  # after each: its findings are kept if the next fails
    for sentence in late:
        print(f"zbv-worker: {sentence}", file=sys.stderr)
    return 1 if late else 0


def _require_planner() -> None:
    """Raises :class:`InvalidRun` where there is no planner, which plans what is measured."""
    from zbv_worker.errors import InvalidRun

    try:
        import_module("zbv_solver.search.search")
    except ModuleNotFoundError as error:
        raise InvalidRun(
            f"bench plans what it measures, and {error.name} is not installed. Install zbv[solver]."
        ) from error


def _job(name: str, parsed: argparse.Namespace) -> Callable[[], Sequence[Finding]]:
    """What measures, with its workload read."""
    from dataclasses import fields, replace

    from benchmarks.worker.workload import read_workload

    comparison = import_module(f"benchmarks.worker.{name}")
    kind: Any = getattr(comparison, f"{name.capitalize()}Workload")
    workload = read_workload(kind, parsed.workload)
    if parsed.rounds is not None and any(field.name == "rounds" for field in fields(kind)):
        workload = replace(workload, rounds=parsed.rounds)

    def measure() -> list[Finding]:
        found: list[Finding] = comparison.measure(workload)
        if name == "gpt" and parsed.rehearse_pp is not None:
            found += _rehearsed_schedules(parsed.rehearse_pp)
        return found

    return measure


def _rehearsed_schedules(pp_degree: int) -> list[Finding]:
    from benchmarks.worker.rehearse import RehearseWorkload, measure_schedules

    return measure_schedules(RehearseWorkload(), pp_degree, 2 * pp_degree)
