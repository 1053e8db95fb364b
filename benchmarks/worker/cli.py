"""``python -m benchmarks worker``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zbv_solver.documents.files import load
from zbv_solver.documents.validation import validated
from zbv_worker.commands.arguments import positive

from benchmarks.findings import WrongInput, add_output, measure_all

if TYPE_CHECKING:
    from benchmarks.worker import ranks

NAMES = ("overhead", "pipeline-step", "pairs", "nccl-model")
DESCRIPTION = """\
Measure ranks on the CPU cores of this machine. Times are ratios of measurements that took turns; on a busy
machine, their intervals are wider.

  overhead       CPU time of the executor per action
  pipeline-step  Pipeline.step, compared with the bare executor
  pairs          a step whose forwards run together with backwards, measured and planned
  nccl-model     which plans hang on a model of NCCL, by the number of kernels that run at once
"""
EXAMPLES = """\
examples:
  python -m benchmarks worker all -o worker.json
  python -m benchmarks worker nccl-model --workload benchmarks/worker/nccl-model-sharded.json
"""
Workload = TypeVar("Workload", bound="ranks.Workload")


def add_worker(commands: Any) -> None:
    """Add the benchmarks of the worker."""
    command = commands.add_parser(
        "worker",
        help="measure the overhead of the worker; run plans on a model of NCCL",
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
        "--rounds", type=positive, metavar="N", help="overhead, pipeline-step: measured rounds"
    )
    add_output(command)
    command.set_defaults(run=_worker)


def _worker(parsed: argparse.Namespace) -> int:
    names: Sequence[str] = NAMES if parsed.name == "all" else (parsed.name,)
    if parsed.workload is not None and len(names) > 1:
        raise WrongInput("--workload: found it with `all`; a workload belongs to one measurement. Name that.")
    jobs = []
    for name in names:
        comparison = import_module(f"benchmarks.worker.{name.replace('-', '_')}")
        kind: Any = getattr(comparison, f"{name.title().replace('-', '')}Workload")
        # Read the workload before the first measurement, so that wrong input is reported at once.
        workload = read_workload(kind, parsed.workload)
        if parsed.rounds is not None and "rounds" in kind.model_fields:
            workload = workload.model_copy(update={"rounds": parsed.rounds})
        jobs.append((name, name, partial(comparison.measure, workload)))
    return measure_all(jobs, parsed.output)


def read_workload(kind: type[Workload], path: Path | None) -> Workload:
    """Return a workload with the fields of a JSON file; the others have their defaults."""
    return kind() if path is None else load(path, partial(validated, kind))
