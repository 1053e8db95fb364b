"""``python -m benchmarks published``, ``reserved`` and ``configs``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.findings import add_output, matching, measure_all

if TYPE_CHECKING:
    from benchmarks.findings import Finding


def add_published(commands: Any) -> None:
    """Add the comparisons of predictions with published runs, or with own ones."""
    command = commands.add_parser(
        "published",
        help="compare predicted step times and memory with published runs, or with own ones",
        description="Predict the step time and the memory of published training runs, and compare. "
        "docs/formats.md documents the file, for own runs.",
    )
    command.add_argument("--only", metavar="GLOB", help="only runs with a matching id")
    command.add_argument("--runs", type=Path, metavar="FILE", help="measured runs (default: published ones)")
    command.add_argument("--each", action="store_true", help="also print a line per run")
    add_output(command)
    command.set_defaults(run=_published)
    command = commands.add_parser(
        "reserved",
        help="compare what PyTorch reserves with what tensors need, in published runs",
        description="Print what PyTorch's allocator reserved over tensors in published runs, the share that "
        "zbv layout takes from them, and the errors for torchtitan's table.",
    )
    add_output(command)
    command.set_defaults(run=_reserved)
    command = commands.add_parser(
        "configs",
        help="print what zbv reads of config.json files",
        description="Print total and active parameters of config.json files, or why zbv refuses one.",
    )
    command.add_argument("files", nargs="+", type=Path, metavar="FILE")
    command.set_defaults(run=_configs)


def _configs(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from benchmarks.published.configs import configs_table

    Console(soft_wrap=True).print(configs_table(parsed.files), highlight=False)
    return 0


def _reserved(parsed: argparse.Namespace) -> int:
    from benchmarks.published.reserved import findings

    return measure_all([("reserved", "reserved by PyTorch over tensors", findings)], parsed.output)


def _published(parsed: argparse.Namespace) -> int:
    from benchmarks.published.runs import RUNS, load_runs

    runs = load_runs(parsed.runs or RUNS)
    chosen = matching(runs, parsed.only, lambda run: run.id)

    def measure() -> list[Finding]:
        from rich.console import Console

        from benchmarks.published.judge import findings, judge, models_table

        judged, refused = judge(chosen)
        console = Console(soft_wrap=True)
        if parsed.each:
            for each in judged:
                console.print(_line(each.run.id, each.time_ratio, each.memory_ratio), highlight=False)
        for each_refused in refused:
            console.print(f"{each_refused.run.id}: {each_refused.reason}", highlight=False)
        console.print(models_table(judged))
        return findings(judged, refused)

    return measure_all([("published", "predicted against measured", measure)], parsed.output)


def _line(name: str, time: float | None, memory: float | None) -> str:
    shown = [
        f"{what} {ratio:.2f}" for what, ratio in (("time", time), ("memory", memory)) if ratio is not None
    ]
    return f"{name}: {', '.join(shown) or 'neither time nor memory measured'}"
