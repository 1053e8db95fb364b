"""Run measurements one after another: print each as a table, write all of them as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_solver.documents.files import output

if TYPE_CHECKING:
    from benchmarks.findings import Finding

Measure = Callable[[], "Sequence[Finding]"]


def add_output(command: argparse.ArgumentParser) -> None:
    """Add the option that names the file of the findings."""
    command.add_argument("-o", "--output", metavar="FILE", type=Path, help="also write the findings as JSON")


def measure_all(jobs: Sequence[tuple[str, str, Measure]], path: Path | None) -> int:
    """Measure, print, write, and return the exit status: 1 if a target was missed.

    Parameters
    ----------
    jobs
        Name, title and function of every measurement.
    path
        Where to write the findings. The file is written after each measurement, so a failure of a later one
        does not lose them.
    """
    from rich.console import Console

    from benchmarks.findings import findings_json, missed, table

    report: dict[str, Any] = {}
    sentences: list[str] = []
    with nullcontext(lambda text: None) if path is None else output(path) as write:
        for name, title, measure in jobs:
            load, cores = os.getloadavg()[0], os.cpu_count()
            findings = measure()
            report[name] = {"load_before": load, "cores": cores, "findings": findings_json(findings)}
            write(json.dumps(report, indent=1) + "\n")
            title = f"{title} (load before: {load:.1f} on {cores} cores)"
            Console(soft_wrap=True).print(table(title, findings))
            sentences += missed(findings)
    for sentence in sentences:
        print(f"benchmarks: {sentence}", file=sys.stderr)
    return 1 if sentences else 0
