"""``zbv-worker gpu-report``: options, execution and exit status."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from zbv_solver.commands.interrupt import terminated_like_interrupted

from zbv_worker.commands.arguments import add_factory_arguments, json_output, positive, text_output

if TYPE_CHECKING:  # it imports torch
    from zbv_worker.gpu_report.check import ReportOptions

_EXIT_FAILED, _EXIT_NO_GPU = 1, 3

_EPILOG = """\
examples:
  zbv-worker gpu-report -o report.json
  zbv-worker gpu-report --list
  zbv-worker gpu-report --only events --only copies
  zbv-worker gpu-report --ranks 8 -o report.json

Every line of the report says pass, fail, or not run with the reason. A check that hangs or crashes fails; the
others still run. docs/without-a-gpu.md says what each check proves that tests without a GPU cannot.

exit status: 0 every line that ran passed; 1 a line failed; 2 wrong input; 3 no CUDA GPU found, nothing
measured.
"""
_DEFAULT_MODEL = "zbv_worker.models.gpt:gpt"
_GPU_MODEL = {"width": 1536, "heads": 12, "length": 1024, "sequences": 4}
"""Large enough that kernels, and not their launches, take the time; about 4 GB with gradients."""


def add_gpu_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    report = commands.add_parser(
        "gpu-report",
        help="check this node's GPUs: everything that tests cannot prove without one, pass or fail per line",
        description="Check this node's CUDA GPUs and write a report, as JSON and as a page: streams, events "
        "and copies, NCCL, memory of stages, cost of the split, profile against run, gradients, overlap of "
        "transfers with compute, and failure of a rank. Checks that need more GPUs than the node has are not "
        "run, and say so. On one GPU the report takes several minutes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument(
        "--model",
        default=_DEFAULT_MODEL,
        metavar="MODULE:FACTORY",
        help="the model (default: a GPT, small with --device cpu)",
    )
    add_factory_arguments(report)
    report.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs the checks that need no GPU (default cuda)",
    )
    report.add_argument(
        "--ranks",
        type=positive,
        default=2,
        metavar="P",
        help="number of ranks of checks that transfer tensors, at least 2 (default 2)",
    )
    report.add_argument(
        "--microbatches", type=positive, default=8, metavar="M", help="microbatches per step (default 8)"
    )
    report.add_argument("--repeats", type=positive, default=10, help="measurements per number (default 10)")
    report.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run only this check; repeatable"
    )
    report.add_argument("--list", action="store_true", help="list the checks and what each proves, then exit")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write the report as JSON (- for standard output)"
    )
    report.add_argument(
        "--page",
        metavar="FILE",
        type=Path,
        help="write the report as an HTML page (default: the name of --output with .html)",
    )
    report.set_defaults(execute=execute)


@terminated_like_interrupted()  # otherwise the ranks would go on
def execute(parsed: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status."""
    from zbv_worker.gpu_report.facts import NoGpu
    from zbv_worker.gpu_report.gpu_report import Report, chosen_checks, gpu_report
    from zbv_worker.gpu_report.page import checked_text, listing, page, summary

    options, checks = _options(parsed), chosen_checks(parsed.only)
    if parsed.list:
        print("\n".join(listing(checks, options)))
        return 0
    with ExitStack() as outputs:
        write = outputs.enter_context(json_output("--output", parsed.output))
        write_page = outputs.enter_context(text_output("--page", _page_path(parsed)))

        is_file = str(parsed.output) != "-"
        lines = sys.stdout if is_file else sys.stderr

        def show(report: Report) -> None:
            print("\n".join(checked_text(report.outcomes[-1])), file=lines, flush=True)
            write_page(page(report))
            if is_file:  # after every check, so that a killed report leaves its results
                write(report.document())

        try:
            report = gpu_report(options, checks, show)
        except NoGpu as error:
            print(f"zbv-worker: {error}", file=sys.stderr)
            return _EXIT_NO_GPU
        if not is_file:
            write(report.document())
    print(summary(report), file=lines)
    return 0 if report.has_passed else _EXIT_FAILED


def _options(parsed: argparse.Namespace) -> ReportOptions:
    from zbv_worker.errors import InvalidRun
    from zbv_worker.gpu_report.check import ReportOptions
    from zbv_worker.model.spec import ModelSpec

    if parsed.ranks < 2:
        raise InvalidRun("--ranks: found 1; must be at least 2, because the report measures transfers.")
    is_default = parsed.model == _DEFAULT_MODEL and parsed.model_args is None
    arguments = parsed.model_args
    if is_default and parsed.device == "cuda":
        arguments = json.dumps({**_GPU_MODEL, "layers": max(8, 2 * parsed.ranks)})
    return ReportOptions(
        ModelSpec.parse(parsed.model, arguments, parsed.seed),
        parsed.device,
        parsed.ranks,
        parsed.microbatches,
        parsed.repeats,
    )


def _page_path(parsed: argparse.Namespace) -> Path | None:
    from zbv_worker.errors import InvalidRun

    output, given = parsed.output, parsed.page
    if given is None and (output is None or str(output) == "-"):
        return None
    path = Path(output).with_suffix(".html") if given is None else Path(given)
    if path == output:
        raise InvalidRun(
            f"--output {output}: this is also the file of the page. Name it {output.stem}.json, for example."
        )
    return path
