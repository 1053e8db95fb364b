"""A rank's report of its run: losses, step times, and when every action happened.

During the run the newest steps are in a file, which the agent sends to the service.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from zbv_worker.errors import naming_errors
from zbv_worker.execution.timeline import Record, StepResult
from zbv_worker.host.state_files import trace_file, write_json
from zbv_worker.tracing.merged_trace import find_offsets
from zbv_worker.transport.channels import Transport

_KEPT_STEPS = 10_000
_KEPT_RECORDS = 1_000_000
_KEPT_EVENTS = 100
_CURVE_STEPS = 512
"""Most steps of a curve: some twenty bytes each, in every trace that is sent."""


@dataclass(frozen=True)
class Updated:
    """The outcome of an update."""

    gradient_norm: float | None = None
    """The norm over all parameters of the model, before clipping; None if it was not needed."""
    is_skipped: bool = False
    """Whether the parameters were left unchanged."""
    non_finite: tuple[tuple[str, float], ...] = ()
    """The values that were infinite or NaN, by name (``loss``, ``gradient norm``), if this rank is the one
    to report them. Overflows that a smaller loss scale may avoid are not included."""
    is_failed: bool = False
    """Whether the run must end because of them."""


@dataclass(frozen=True)
class StepLine:
    """The numbers of one step."""

    step: int
    plan_id: str
    loss: float | None
    """Mean over the microbatches of all replicas; None on ranks without the last stage."""
    seconds: float
    """Time from the start of the rank's first action to the end of its last; summed over the runs of the
    plan if a step has several."""
    update_seconds: float
    """Time for gradient sums and the optimizer after that; not part of ``seconds``."""
    updated: Updated = field(default_factory=Updated)
    auxiliary_loss: float | None = None
    """The sum of the auxiliary losses of this rank's stages, averaged over its replica's microbatches
    (with weights, by these). The loss does not contain them. None without any."""


class StepCurve:
    """Seconds and losses of all steps since the start, evenly thinned when there are many.

    It has the first and the newest step, and between them those whose number is a multiple of a power of two.
    So all ranks keep the same steps.
    """

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float | None]] = []
        """Step, seconds and loss; None for a loss that this rank does not know, or that is not finite."""
        self._every = 1

    def add(self, line: StepLine) -> None:
        """Add the newest step."""
        if len(self.points) > 1 and self.points[-1][0] % self._every:
            self.points.pop()
        self.points.append((line.step, line.seconds, _finite(line.loss)))
        if len(self.points) > _CURVE_STEPS:
            self._every *= 2
            first, *between, last = self.points
            self.points = [first, *(point for point in between if point[0] % self._every == 0), last]


@dataclass
class RankReport:
    """The results of one rank.

    Its size is bounded: it keeps the newest 10,000 lines, and about a million records (one per action). The
    rank's log has every loss.
    """

    plan_id: str
    """The plan that the run started with; every step has its own."""
    rank: int
    lines: deque[StepLine] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    recent: deque[tuple[str, StepResult]] = field(default_factory=deque)
    """One entry per step, oldest first; ``recent`` has the newest steps with their records."""
    curve: StepCurve = field(default_factory=StepCurve)
    evaluations: dict[int, float] = field(default_factory=dict)
    """Losses of evaluations, by the step before which they ran."""
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    """The newest 100 notable events: ``kind``, ``step``, and fields that depend on the kind."""
    _records: int = 0

    def add(self, line: StepLine, result: StepResult) -> None:
        """Add a step."""
        self.lines.append(line)
        self.curve.add(line)
        self.recent.append((line.plan_id, result))
        self._records += len(result.records)
        while len(self.recent) > 1 and (self._records > _KEPT_RECORDS or len(self.recent) > _KEPT_STEPS):
            self._records -= len(self.recent.popleft()[1].records)

    def newest(self, steps: int | None = None) -> list[StepResult]:
        """The newest steps with records of one plan, oldest first."""
        newest_first = list(reversed(self.recent))
        same = [result for _, result in takewhile(lambda each: each[0] == newest_first[0][0], newest_first)]
        return same[:steps][::-1]

    def write(self, folder: Path) -> Path:
        """Write ``rank-{rank}.json`` to a folder, which is created if necessary."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}.json"
        path.write_text(json.dumps(self.document()))
        return path

    def document(self) -> dict[str, Any]:
        """The report as JSON.

        Times are in seconds; actions are [text, wait, start, end, bytes received] with nanoseconds, those of
        the last run of the plan in a step. JSON has no infinite numbers, so such a loss or norm is a string:
        ``nan``, ``inf`` or ``-inf``. The clock is the host's monotonic one: ranks of one host share it, ranks
        of different hosts do not.
        """
        records = {result.step: result.records for _, result in self.recent}
        return {
            "plan_id": self.plan_id,
            "rank": self.rank,
            "steps": [
                {
                    "step": line.step,
                    "plan_id": line.plan_id,
                    "loss": _number(line.loss),
                    **_auxiliary(line),
                    "seconds": line.seconds,
                    "optimizer_seconds": line.update_seconds,
                    "gradient_norm": _number(line.updated.gradient_norm),
                    "skipped": line.updated.is_skipped,
                    "actions": actions_json(records.get(line.step, ())),
                }
                for line in self.lines
            ],
            "events": list(self.events),
            "evaluations": [{"step": step, "loss": _number(loss)} for step, loss in self.evaluations.items()],
        }


def _auxiliary(line: StepLine) -> dict[str, Any]:
    return {} if line.auxiliary_loss is None else {"auxiliary_loss": _number(line.auxiliary_loss)}


def _number(value: float | None) -> float | str | None:
    """A number, or a string if JSON cannot represent it."""
    return value if value is None or math.isfinite(value) else str(value)


def actions_json(records: Sequence[Record]) -> list[list[Any]]:
    """Records as [text, wait, start, end, bytes received]."""
    return [[str(r.action), r.wait, r.start, r.end, r.received] for r in records]


@dataclass(frozen=True)
class RunSummary:
    """The combined reports of all ranks."""

    plan_id: str
    step_seconds: tuple[float, ...]
    """For each step, the slowest rank's time from the start of its first action to the end of its last,
    which corresponds to a plan's span. Optimizer and data loading are not included."""
    busy_seconds: tuple[float, ...]
    """For each step, the time in actions, summed over the ranks."""
    losses: tuple[float, ...]
    """The loss of each step."""

    def median_seconds(self, warm_up: int = 2) -> float:
        """The median step time without the first steps, in which allocators and caches settle."""
        return median(self.step_seconds[warm_up:] or self.step_seconds)

    def median_busy(self, warm_up: int = 2) -> float:
        """The median time in actions, without the first steps."""
        return median(self.busy_seconds[warm_up:] or self.busy_seconds)

    def spread(self, warm_up: int = 2) -> float:
        """How much longer than the median the slowest tenth of the steps took, as a fraction."""
        steps = sorted(self.step_seconds[warm_up:] or self.step_seconds)
        return steps[int(0.9 * (len(steps) - 1))] / median(steps) - 1


def read_reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Read the reports that the ranks wrote, by rank."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def summarise(documents: Sequence[dict[str, Any]]) -> RunSummary:
    """Combine the reports of all ranks of one run."""
    steps = range(len(documents[0]["steps"]))
    per_step = [[document["steps"][step] for document in documents] for step in steps]
    return RunSummary(
        plan_id=documents[0]["plan_id"],
        step_seconds=tuple(max(entry["seconds"] for entry in entries) for entries in per_step),
        busy_seconds=tuple(sum(map(_busy, entries)) for entries in per_step),
        losses=tuple(
            next(float(entry["loss"]) for entry in entries if entry["loss"] is not None)
            for entries in per_step
        ),
    )


def _busy(entry: dict[str, Any]) -> float:
    """Seconds in actions; time in both actions of a pair counts once."""
    nanoseconds = last = 0
    for start, end in sorted((start, end) for _, _, start, end, _ in entry["actions"]):
        nanoseconds += max(0, end - max(start, last))
        last = max(last, end)
    return nanoseconds / 1e9


_SECONDS = 5.0
_MOST_STEPS = 5
_MOST_ACTIONS = 20_000
"""Limits the cost to some ten milliseconds of a step, every few seconds."""


class TraceFile:
    """Writes ``trace-{rank}.json``. Creating one is collective, because the ranks compare their clocks."""

    def __init__(self, folder: Path, transport: Transport, timeout: float):
        with naming_errors(transport.rank, "comparing clocks"):
            offset = find_offsets(transport, timeout)[transport.rank]
        self._path = trace_file(folder, transport.rank)
        self._head: dict[str, Any] = {
            "rank": transport.rank,
            "pp_rank": transport.pp_rank,
            # Ranks that compute a replica together send a trace each, and the service tells them apart.
            "replica": transport.column,
            "clock_offset_ns": offset.ahead,
            "uncertainty_ns": offset.uncertainty,
        }
        self._next = time.monotonic()

    def update(self, report: RankReport, *, is_last: bool = False) -> None:
        """Write the newest steps if it is time, or if the run ends."""
        if not report.lines or not (is_last or self._is_time(report.lines[-1].step)):
            return
        newest = report.newest(_MOST_STEPS)
        fitting = max(1, _MOST_ACTIONS // max(1, len(newest[-1].records)))
        losses = {line.step: line.loss for line in list(report.lines)[-_MOST_STEPS:]}
        steps = [
            {
                "step": result.step,
                "loss": _finite(losses.get(result.step)),
                "seconds": result.seconds,
                "actions": actions_json(result.records),
            }
            for result in newest[-fitting:]
        ]
        body = {"plan_id": report.lines[-1].plan_id, "curve": report.curve.points, "steps": steps}
        write_json(self._path, {**self._head, **body})
        self._next = time.monotonic() + _SECONDS

    def _is_time(self, step: int) -> bool:
        """Whether to write after this step; all ranks choose the same steps, so that their files match."""
        return (step + 1) % _MOST_STEPS == 0 and time.monotonic() >= self._next


def _finite(loss: float | None) -> float | None:
    """Replace infinite numbers and NaN, which JSON does not have, by None."""
    return loss if loss is not None and math.isfinite(loss) else None
