"""The results, and their JSON document; docs/benchmarks.md explains every key."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

from zbv_solver import __version__
from zbv_solver.documents.files import number
from zbv_solver.search.options import SearchOptions

from benchmarks.planner.ablation import Contribution
from benchmarks.planner.measure import Outcome, Point
from benchmarks.planner.tally import Tally, tally
from benchmarks.planner.verdicts import Standing, judge, reached, reached_after


@dataclass(frozen=True)
class Run:
    """One run of a suite without the stages ``without``; incomplete if it was interrupted."""

    without: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    interrupted: bool = False


@dataclass(frozen=True)
class Report:
    """The runs of one command; they only differ in the stages that an ablation leaves out."""

    options: SearchOptions
    runs: tuple[Run, ...]
    contributions: tuple[Contribution, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether instances are missing."""
        return any(run.interrupted for run in self.runs)


def report_json(report: Report) -> dict[str, Any]:
    """The report as a JSON document."""
    return {
        "version": __version__,
        "machine": _machine_json(),
        "options": _options_json(report.options),
        "interrupted": report.interrupted,
        "runs": [
            {
                "without": list(run.without),
                "instances": [outcome_json(outcome) for outcome in run.outcomes],
                "sum": _fields_json(tally(run.outcomes)),
            }
            for run in report.runs
        ],
        "ablation": [_fields_json(entry) for entry in report.contributions],
    }


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The result of a search of one instance, with its progress."""
    instance, judgement = outcome.instance, judge(outcome)
    return {
        "suite": instance.suite,
        "name": instance.name,
        "objective": instance.problem.objective,
        "status": "infeasible" if outcome.infeasible else "done",
        "infeasible": outcome.infeasible,
        "options": _options_json(outcome.options),
        "value": _finite(outcome.value),
        "lower_bound": _finite(outcome.lower_bound),
        "gap": _finite(outcome.gap),
        "method": outcome.method,
        "seconds": _rounded(outcome.seconds),
        "first_plan_seconds": _rounded(outcome.first_plan_seconds),
        "cut": outcome.cut,
        "verdict": judgement.verdict,
        "peer": None if judgement.best is None else _standing_json(judgement.best),
        "ratio": None if judgement.ratio is None else _finite(judgement.ratio),
        "below_bound": [_standing_json(entry) for entry in judgement.below_bound],
        "contradicting": [_standing_json(entry) for entry in judgement.contradicting],
        "reach": _reach_json(outcome),
        "progress": [_point_json(point) for point in outcome.curve],
    }


def _standing_json(standing: Standing) -> dict[str, Any]:
    peer = standing.peer
    return {"name": peer.name, "placement": peer.placement, "value": number(standing.value)}


def _reach_json(outcome: Outcome) -> dict[str, Any] | None:
    reach = outcome.instance.reach
    if reach is None:
        return None
    return {
        "gap": reach.gap,
        "seconds": reach.seconds,
        "reached": reached(outcome),
        "after": _rounded(reached_after(outcome)),
    }


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "seconds": _rounded(point.seconds),
        "objective": number(point.objective),
        "lower_bound": number(point.lower_bound),
        "gap": _finite(point.gap),
        "method": point.method,
    }


def _options_json(options: SearchOptions) -> dict[str, Any]:
    """The options of the search."""
    return {
        "effort": options.effort,
        "time_limit": options.time_limit,
        "seed": options.seed,
        "workers": options.workers,
        "without": list(options.without),
    }


def _machine_json() -> dict[str, Any]:
    """The machine, on which seconds depend."""
    return {
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
    }


def _fields_json(entry: Tally | Contribution) -> dict[str, Any]:
    return {key: _rounded(value) for key, value in asdict(entry).items()}


def _finite(value: float) -> float | int | None:
    """Return null for infinity, which JSON does not have."""
    return number(value) if math.isfinite(value) else None


def _rounded(value: Any) -> Any:
    """Round to a millionth, the resolution of the clocks."""
    return round(value, 6) if isinstance(value, float) else value
