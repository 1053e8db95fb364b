"""``python -m benchmarks worker``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_worker.commands.arguments import positive

from benchmarks.measuring import Measure, add_output, measure_all

if TYPE_CHECKING:
    from benchmarks.findings import Finding

NAMES = (
    *("overhead", "pipeline-step", "gpt", "split"),
    *("packing", "memory", "rehearse", "nccl-model", "layouts"),
)
DESCRIPTION = """\
Measure two or more ranks on the CPU cores of this machine. Times are ratios of measurements that took turns;
on a busy machine, their intervals are wider.

  overhead  CPU time per action, compared with PyTorch's runtime
  pipeline-step  Pipeline.step, compared with the bare executor
  gpt       a GPT with our plan and with PyTorch's schedules
  split     I + W, compared with the fused backward
  packing   steps of packed replicas, compared with equal tokens in the given order
  memory    peaks of real steps, compared with the plan
  rehearse  time of a rehearsal, compared with the plan
  nccl-model  which plans hang on a model of NCCL, by the number of kernels that run at once
  layouts   steps of all layouts of 4 processes, compared with what zbv layout predicts from a profile
"""
EXAMPLES = """\
examples:
  python -m benchmarks worker all -o worker.json
  python -m benchmarks worker gpt --rehearse-pp 8
  python -m benchmarks worker memory --workload benchmarks/worker/memory-wide.json
"""


def add_worker(commands: Any) -> None:
    """Add the benchmarks of the worker."""
    command = commands.add_parser(
        "worker",
        help="measure overhead, speed, split, memory and rehearsals of the worker",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("name", choices=(*NAMES, "all"), help="what to measure")
    command.add_argument(
        "--workload",
        metavar="FILE",
        type=Path,
        help="replace fields of the workload; benchmarks/worker has examples",
    )
    command.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="gpt, layouts, overhead, packing, pipeline-step, split: measured rounds",
    )
    command.add_argument(
        "--rehearse-pp",
        type=positive,
        metavar="P",
        help="gpt: also rehearse the schedules with P ranks that sleep instead of computing",
    )
    add_output(command)
    command.set_defaults(run=_worker)


def _worker(parsed: argparse.Namespace) -> int:
    from benchmarks.errors import WrongInput

    names = NAMES if parsed.name == "all" else (parsed.name,)
    if parsed.workload is not None and len(names) > 1:
        raise WrongInput("--workload: found it with `all`; a workload belongs to one measurement. Name that.")
    # Read every workload before the first measurement, so that wrong input is reported at once.
    return measure_all([(name, name, _job(name, parsed)) for name in names], parsed.output)


def _job(name: str, parsed: argparse.Namespace) -> Measure:
    from benchmarks.worker.workload import read_workload

    comparison = import_module(f"benchmarks.worker.{name.replace('-', '_')}")
    kind: Any = getattr(comparison, f"{name.title().replace('-', '')}Workload")
    workload = read_workload(kind, parsed.workload)
    if parsed.rounds is not None and any(field.name == "rounds" for field in fields(kind)):
        workload = replace(workload, rounds=parsed.rounds)

    def measure() -> Sequence[Finding]:
        found: list[Finding] = comparison.measure(workload)
        if name == "gpt" and parsed.rehearse_pp is not None:
            found += _rehearsed_schedules(parsed.rehearse_pp)
        return found

    return measure


def _rehearsed_schedules(pp_degree: int) -> list[Finding]:
    from benchmarks.worker.rehearse import RehearseWorkload, measure_schedules

    return measure_schedules(RehearseWorkload(), pp_degree, 2 * pp_degree)
