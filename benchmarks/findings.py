"""Measured numbers, their targets and verdicts: measured one after another, as tables and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from zbv_solver.documents.files import output

_RESAMPLES, _CONFIDENCE, _SEED = 2000, 0.95, 0
Item = TypeVar("Item")


class BenchmarkError(Exception):
    """The measurement failed (exit status 1)."""


class WrongInput(BenchmarkError):
    """The command's input is wrong (exit status 2)."""


@dataclass(frozen=True)
class Target:
    """The target of a number."""

    limit: float
    rule: Literal["at most", "at least"] = "at most"


@dataclass(frozen=True)
class Finding:
    """One measured number."""

    what: str
    value: float
    unit: str = ""
    target: Target | None = None
    """None for a number that is only reported."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the value, or None if it is unknown."""

    @property
    def excess(self) -> float:
        """By how much the target is missed, in the number's unit; 0 if it is met or there is none."""
        if self.target is None:
            return 0.0
        limit, is_most = self.target.limit, self.target.rule == "at most"
        return max(0.0, self.value - limit if is_most else limit - self.value)

    @property
    def verdict(self) -> str:
        """``met``, ``missed by …``, or an empty string without a target."""
        if self.target is None:
            return ""
        return f"missed by {self._shown(self.excess)}" if self.excess > 0 else "met"

    @property
    def asked(self) -> str:
        """The target in words."""
        if self.target is None:
            return ""
        return f"{'≤' if self.target.rule == 'at most' else '≥'} {self._shown(self.target.limit)}"

    @property
    def measured(self) -> str:
        """The value, with its interval."""
        if self.interval is None:
            return self._shown(self.value)
        low, high = (self._shown(end) for end in self.interval)
        return f"{self._shown(self.value)} ({low} … {high})"

    def _shown(self, value: float) -> str:
        return f"{value:,.4g} {self.unit}".rstrip()


Measure = Callable[[], Sequence[Finding]]


def at_most(limit: float | None) -> Target | None:
    """Return an upper limit as a target; None if there is no limit."""
    return None if limit is None else Target(limit)


def at_least(limit: float) -> Target:
    """Return a lower limit as a target."""
    return Target(limit, "at least")


def table(title: str, findings: Iterable[Finding]) -> Table:
    """Return a table with one row per number."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for column in ("target", "measured", "verdict"):
        shown.add_column(column, justify="right")
    for finding in findings:
        style = "red" if finding.excess > 0 else None
        shown.add_row(finding.what, finding.asked, finding.measured, finding.verdict, style=style)
    return shown


def findings_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return all facts and verdicts as JSON values."""
    return [
        {**asdict(each), "what": each.what.strip(), "verdict": each.verdict, "missed_by": each.excess}
        for each in findings
    ]


def missed(findings: Sequence[Finding]) -> list[str]:
    """Return a sentence per missed target."""
    return [
        f"{each.what.strip()}: target {each.asked}, measured {each.measured}, {each.verdict}"
        for each in findings
        if each.excess > 0
    ]


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


def matching(items: Sequence[Item], only: str | None, name: Callable[[Item], str]) -> tuple[Item, ...]:
    """Return the items with a name that matches the glob ``only``; raises :class:`WrongInput` without any."""
    chosen = tuple(item for item in items if only is None or fnmatchcase(name(item), only))
    if not chosen:
        known = ", ".join(map(name, items[:3])) + (", …" if len(items) > 3 else "")
        raise WrongInput(
            f"--only: found {only!r}, which matches none of the {len(items)} names ({known}). Give a name or "
            "a pattern with * and ?."
        )
    return chosen


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    rank = ceil(share * len(ordered) - 1e-9)  # 0.07 of 100 is 7.000000000000001
    return ordered[min(len(ordered), max(1, rank)) - 1]


def paired_ratio(mine: Sequence[float], other: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median ratio of measurements that took turns, and its bootstrap interval.

    A disturbance of a round affects both of its measurements and cancels in their ratio.
    """
    ratios = [one / two for one, two in zip(mine, other, strict=True)]
    return median_interval(np.asarray(ratios, dtype=float))


def median_interval(values: NDArray[np.float64]) -> tuple[float, tuple[float, float]]:
    """Return the median of some values, and its bootstrap interval (percentiles; Efron 1979)."""
    chosen = np.random.default_rng(_SEED).integers(len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[chosen], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return float(np.median(values)), (float(low), float(high))
