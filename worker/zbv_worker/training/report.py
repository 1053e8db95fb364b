"""What a rank reports of its run: losses, step times, and when every action happened."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from zbv_worker.execution.executor import StepResult
from zbv_worker.execution.timeline import Record
from zbv_worker.training.update import Updated

_KEPT_STEPS = 10_000
_KEPT_RECORDS = 1_000_000
_KEPT_EVENTS = 100


@dataclass(frozen=True)
class StepLine:
    """One step in numbers.

    Attributes
    ----------
    loss
        Mean over the microbatches of all replicas; None on ranks without the last stage.
    seconds
        From the start of the rank's first action to the end of its last.
    update_seconds
        What came after it: waiting for gradient sums, the optimizer. Not part of ``seconds``.
    """

    step: int
    plan_id: str
    loss: float | None
    seconds: float
    update_seconds: float
    updated: Updated = field(default_factory=Updated)


@dataclass
class RankReport:
    """One rank's results.

    A long run does not grow without bound: of lines the newest 10,000 are kept, and of records (one per
    action) about a million. The rank's log has every loss.

    Attributes
    ----------
    plan_id
        The plan that the run began with; every step says its own.
    lines, recent
        Per step, the oldest first; ``recent`` are the newest of them with their records.
    evaluations
        Losses of evaluations, by the step before which they were made.
    events
        What happened that people should know, the newest 100: ``kind``, ``step``, and what the kind has more.
    """

    plan_id: str
    rank: int
    lines: deque[StepLine] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    recent: deque[tuple[str, StepResult]] = field(default_factory=deque)
    evaluations: dict[int, float] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    _records: int = 0

    def add(self, line: StepLine, result: StepResult) -> None:
        """Take note of a step."""
        self.lines.append(line)
        self.recent.append((line.plan_id, result))
        self._records += len(result.records)
        while len(self.recent) > 1 and (self._records > _KEPT_RECORDS or len(self.recent) > _KEPT_STEPS):
            self._records -= len(self.recent.popleft()[1].records)

    def newest(self, steps: int | None = None) -> list[StepResult]:
        """The newest steps that have records and one and the same plan, the oldest first."""
        newest_first = list(reversed(self.recent))
        same = [result for _, result in takewhile(lambda each: each[0] == newest_first[0][0], newest_first)]
        return same[:steps][::-1]

    def write(self, folder: Path) -> Path:
        """Write ``rank-{rank}.json`` into a folder, made when absent."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}.json"
        path.write_text(json.dumps(self.document()))
        return path

    def document(self) -> dict[str, Any]:
        """The report as JSON; times in seconds, actions as [text, wait, start, end, bytes received], where
        wait, start and end are nanoseconds. JSON has no word for what is not finite: such a loss or norm is a
        text, ``nan``, ``inf`` or ``-inf``.

        The clock is the host's monotonic one: ranks of one host share it, ranks of different hosts do not.
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


def _number(value: float | None) -> float | str | None:
    """A number as JSON can say it."""
    return value if value is None or math.isfinite(value) else str(value)


def actions_json(records: Sequence[Record]) -> list[list[Any]]:
    """Records as [text, wait, start, end, bytes received]."""
    return [[str(r.action), r.wait, r.start, r.end, r.received] for r in records]


@dataclass(frozen=True)
class RunSummary:
    """What all ranks' reports say together.

    Attributes
    ----------
    step_seconds
        Per step the slowest rank's time from the start of its first action to the end of its last, which is
        what a plan's span states. Optimizer and data loading are outside of it.
    busy_seconds
        Per step the time in actions, summed over the ranks.
    losses
        Per step.
    """

    plan_id: str
    step_seconds: tuple[float, ...]
    busy_seconds: tuple[float, ...]
    losses: tuple[float, ...]

    def median_seconds(self, warm_up: int = 2) -> float:
        """Median step time without the first steps, in which allocators and caches settle."""
        return median(self.step_seconds[warm_up:] or self.step_seconds)

    def median_busy(self, warm_up: int = 2) -> float:
        """Median time in actions, as :meth:`median_seconds`."""
        return median(self.busy_seconds[warm_up:] or self.busy_seconds)

    def spread(self, warm_up: int = 2) -> float:
        """How much longer than the median the slowest tenth of the steps took, relative."""
        steps = sorted(self.step_seconds[warm_up:] or self.step_seconds)
        return steps[int(0.9 * (len(steps) - 1))] / median(steps) - 1


def read_reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The documents that the ranks wrote, by rank."""
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
    nanoseconds: int = sum(end - start for _, _, start, end, _ in entry["actions"])
    return nanoseconds / 1e9
