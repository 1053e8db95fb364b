"""``zbv-worker profile``: its options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zbv_worker.arguments import add_model, positive, positive_number

_EXAMPLES = """\
example:
  zbv-worker profile --model zbv_worker.models.gpt:gpt --pp 2 --microbatches 8 -o problem.json
  zbv plan problem.json -o plan.json
"""


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        help="measure a model's stages on this machine and write a problem",
        description="Measure F, I, W, B, transfers and memory of a model's 2P stages, by P ranks at once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(profile)
    profile.add_argument("--pp", type=positive, required=True, metavar="P", help="number of ranks")
    profile.add_argument(
        "--microbatches", type=positive, required=True, metavar="M", help="microbatches per step"
    )
    profile.add_argument("--repeats", type=positive, default=10, help="measurements per number (default 10)")
    profile.add_argument(
        "--memory-limit-fraction",
        type=positive_number,
        metavar="X",
        help="limit the memory of each rank to X of what 1F1B needs on its fullest rank (default: unlimited)",
    )
    profile.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="write everything that was measured, as JSON: medians and 90th percentiles, memory by kind, "
        "transfers by size and direction with latency and bandwidth; and print it as tables on stderr",
    )
    profile.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the problem; - for standard output"
    )


def execute(parsed: argparse.Namespace) -> int:
    """Measure and write; returns the exit status."""
    from rich.console import Console

    from zbv_worker.model import ModelSpec
    from zbv_worker.profiling.profile import ProfileOptions, measure_ranks, to_problem, write_problem
    from zbv_worker.profiling.report import print_report, report_json

    options = ProfileOptions(
        model=ModelSpec.parse(parsed.model, parsed.model_args, parsed.seed),
        pp_degree=parsed.pp,
        microbatches=parsed.microbatches,
        repeats=parsed.repeats,
        backend=parsed.backend,
        memory_limit_fraction=parsed.memory_limit_fraction,
        timeout=parsed.timeout,
    )
    ranks = measure_ranks(options)
    write_problem(to_problem(options, ranks), parsed.output)
    if parsed.report is not None:
        parsed.report.write_text(json.dumps(report_json(ranks), indent=2) + "\n")
        print_report(ranks, Console(stderr=True))
    return 0
