"""Runs the checks of a GPU report, one after another, and collects their lines.

Every check has its own processes and a time limit, so that a kernel that hangs, or a process that
crashes, fails one check and not the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.gpu_report.check import (
    Check,
    Checked,
    Line,
    OnRanks,
    ReportOptions,
    Verdict,
    failed,
    not_run,
)
from zbv_worker.gpu_report.checks import CHECKS
from zbv_worker.gpu_report.facts import device_facts
from zbv_worker.gpu_report.process import request_of
from zbv_worker.host.local_ranks import LaunchError
from zbv_worker.measure.ranks import measure_on_ranks

_PROCESS = "zbv_worker.gpu_report.process"


@dataclass(frozen=True)
class Report:
    """A whole report."""

    facts: Mapping[str, Any]
    """Devices and versions."""
    outcomes: tuple[Checked, ...]

    @property
    def has_passed(self) -> bool:
        """Whether every line that ran passed."""
        return all(outcome.verdict != "fail" for outcome in self.outcomes)

    def count(self, verdict: Verdict) -> int:
        """The number of lines with a verdict."""
        return sum(line.verdict == verdict for outcome in self.outcomes for line in outcome.lines)

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "facts": dict(self.facts),
            "passed": self.has_passed,
            "lines": {name: self.count(name) for name in ("pass", "fail", "not run")},
            "checks": [
                {
                    "name": outcome.check.name,
                    "title": outcome.check.title,
                    "proves": outcome.check.proves,
                    "remedy": outcome.check.remedy,
                    "verdict": outcome.verdict,
                    "seconds": round(outcome.seconds, 2),
                    "lines": [asdict(line) for line in outcome.lines],
                    "values": list(outcome.values),
                }
                for outcome in self.outcomes
            ],
        }


def chosen_checks(names: Sequence[str]) -> list[Check]:
    """The checks of some names, or all; raises :class:`InvalidRun` for an unknown name."""
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise InvalidRun(
            f"--only: found {', '.join(unknown)}; must be names of checks. `zbv-worker gpu-report --list` "
            f"shows them."
        )
    return [check for name, check in CHECKS.items() if not names or name in names]


def gpu_report(
    options: ReportOptions,
    checks: Sequence[Check],
    on_checked: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run checks; returns the report.

    Parameters
    ----------
    on_checked
        Called after every check, with the report so far.

    Raises
    ------
    NoGpu
        If ``cuda`` is requested but not available.
    """
    report = Report(device_facts(options.device), ())
    for check in checks:
        report = replace(report, outcomes=(*report.outcomes, run_check(check, options)))
        on_checked(report)
    return report


def run_check(check: Check, options: ReportOptions) -> Checked:
    """Run one check; an error becomes a line that failed."""
    lack = check.needs.lack(options)
    if lack is not None:
        return Checked(check, (not_run(check.title, lack),))
    start = time.monotonic()
    values: Sequence[Any] = ()
    lines: list[Line] = []
    try:
        if isinstance(check.run, OnRanks):
            ranks = check.run.ranks(options)
            values = measure_on_ranks([_PROCESS], request_of(check.name, options), ranks, check.seconds)
            lines += check.run.judge(options, values)
        else:
            lines += check.run(options)
    except LaunchError as error:
        lines.append(failed(check.title, str(error)))
    except Exception as error:  # a check must not end the report
        lines.append(failed(check.title, f"the check failed: {describe_error(error)}"))
    return Checked(check, tuple(lines), time.monotonic() - start, tuple(values))
