"""What a rank reports of its run: losses, step times, and when every action happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from zbv_worker.executor import StepResult


@dataclass
class RankReport:
    """One rank's results, one entry per step.

    Attributes
    ----------
    optimizer_seconds
        What the optimizer took after each step; not part of a step's time.
    """

    plan_id: str
    rank: int
    steps: list[StepResult] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write ``rank-{rank}.json`` into a folder, made when absent."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}.json"
        path.write_text(json.dumps(self.document()))
        return path

    def document(self) -> dict[str, Any]:
        """The report as JSON; times in seconds, actions as [text, wait, start, end, bytes received], where
        wait, start and end are nanoseconds.

        The clock is the host's monotonic one: ranks of one host share it, ranks of different hosts do not.
        """
        return {
            "plan_id": self.plan_id,
            "rank": self.rank,
            "steps": [
                {
                    "step": result.step,
                    "loss": result.loss,
                    "seconds": result.seconds,
                    "optimizer_seconds": optimizer,
                    "actions": [[str(r.action), r.wait, r.start, r.end, r.received] for r in result.records],
                }
                for result, optimizer in zip(self.steps, self.optimizer_seconds, strict=True)
            ],
        }


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
            next(entry["loss"] for entry in entries if entry["loss"] is not None) for entries in per_step
        ),
    )


def _busy(entry: dict[str, Any]) -> float:
    nanoseconds: int = sum(end - start for _, _, start, end, _ in entry["actions"])
    return nanoseconds / 1e9
