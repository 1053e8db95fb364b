"""A rank's newest steps in a file during the run, which the agent sends to the service."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from zbv_worker.errors import naming_errors
from zbv_worker.host.state_files import trace_file, write_json
from zbv_worker.tracing.clocks import find_offsets
from zbv_worker.tracing.report import RankReport, actions_json
from zbv_worker.transport.channels import Transport

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
        write_json(self._path, {**self._head, "plan_id": report.lines[-1].plan_id, "steps": steps})
        self._next = time.monotonic() + _SECONDS

    def _is_time(self, step: int) -> bool:
        """Whether to write after this step; all ranks choose the same steps, so that their files match."""
        return (step + 1) % _MOST_STEPS == 0 and time.monotonic() >= self._next


def _finite(loss: float | None) -> float | None:
    """Replace infinite numbers and NaN, which JSON does not have, by None."""
    return loss if loss is not None and math.isfinite(loss) else None
