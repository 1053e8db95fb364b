"""``zbv-worker gpu-report``: options, execution and exit status."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zbv_worker.commands.arguments import add_factory_arguments, json_output, positive

_EXIT_FAILED, _EXIT_NO_GPU = 1, 3

_EPILOG = """\
examples:
  zbv-worker gpu-report -o report.json
  zbv-worker gpu-report -o report.json --model mypackage.model:build --ranks 4

exit status: 0 report written, gradients correct; 1 gradients wrong, or a rank failed; 2 wrong input; 3 no
CUDA GPU found, nothing measured.
"""
_DEFAULT_MODEL = "zbv_worker.models.gpt:gpt"


def add_gpu_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    report = commands.add_parser(
        "gpu-report",
        help="measure this node's GPUs: profile, cost of the split, overlap of transfers, correct gradients",
        description="Run a small pipeline on this node's CUDA GPUs: with NCCL if each rank has a GPU, else "
        "with gloo and shared GPUs. Report the devices, a profile, the cost of splitting the backward, "
        "memory after F, I and W, how much of the transfers overlaps with compute, and whether the gradients "
        "equal those of one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument(
        "--model", default=_DEFAULT_MODEL, metavar="MODULE:FACTORY", help="the model (default: a small GPT)"
    )
    add_factory_arguments(report)
    report.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu shows the report's format on machines without a GPU (default cuda)",
    )
    report.add_argument(
        "--ranks", type=positive, default=2, metavar="P", help="number of ranks, at least 2 (default 2)"
    )
    report.add_argument(
        "--microbatches", type=positive, default=8, metavar="M", help="microbatches per step (default 8)"
    )
    report.add_argument("--repeats", type=positive, default=10, help="measurements per number (default 10)")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="write the report as JSON"
    )
    report.set_defaults(execute=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status."""
    from rich.console import Console

    from zbv_worker.errors import InvalidRun
    from zbv_worker.measure.gpu_report.gpu_report import NoGpu, ReportOptions, gpu_report, print_gpu_report
    from zbv_worker.model.spec import ModelSpec

    if parsed.ranks < 2:
        raise InvalidRun("--ranks: found 1; must be at least 2, because the report measures transfers.")
    options = ReportOptions(
        ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed),
        parsed.device,
        parsed.ranks,
        parsed.microbatches,
        parsed.repeats,
    )
    with json_output("--output", parsed.output) as write:
        try:
            report = gpu_report(options)
        except NoGpu as error:
            print(f"zbv-worker: {error}", file=sys.stderr)
            return _EXIT_NO_GPU
        write(report)
    print_gpu_report(report, Console())
    return 0 if report["gradients"]["right"] else _EXIT_FAILED
