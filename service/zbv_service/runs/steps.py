"""Durations and losses of a run's newest steps, from the traces of its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from zbv_service.compute.computations import Computations
from zbv_service.compute.waiting import Cache
from zbv_service.database import PartTable
from zbv_service.documents.problems import unpack
from zbv_service.records.runs import PartInfo

MOST_READ = 16
"""Most ranks with traces to read, spread over the pipeline: unpacking hundreds of traces takes seconds."""
CACHED = 512


@dataclass(frozen=True)
class StepLine:
    """A step: seconds of the slowest rank that was read, and the loss if one of these ranks has it."""

    step: int
    seconds: float
    loss: float | None


class RunSteps:
    """Reads steps from traces, each trace once."""

    def __init__(self, parts: PartTable, computations: Computations):
        self._parts = parts
        self._computations = computations
        self._read: Cache[tuple[StepLine, ...]] = Cache(CACHED)

    async def newest(self, run_id: str, index: Sequence[PartInfo]) -> tuple[StepLine, ...]:
        """The steps of the first replica in the newest generation that has traces, ascending."""
        traces = [part for part in index if part.kind == "trace" and part.replica == 0]
        newest = max((part.generation for part in traces), default=0)
        parts = sorted((part for part in traces if part.generation == newest), key=lambda part: part.rank)
        found = await asyncio.gather(*(self._of(run_id, part) for part in _spread(parts)))
        steps: dict[int, StepLine] = {}
        for line in (line for lines in found for line in lines):
            known = steps.setdefault(line.step, line)
            loss = line.loss if known.loss is None else known.loss
            steps[line.step] = StepLine(line.step, max(line.seconds, known.seconds), loss)
        return tuple(steps[step] for step in sorted(steps))

    async def _of(self, run_id: str, part: PartInfo) -> tuple[StepLine, ...]:
        async def load() -> tuple[StepLine, ...]:
            found = await self._parts.read(run_id, part.generation, "trace", [part.rank])
            return await self._computations.run(_lines, found[0].body) if found else ()

        key = f"{run_id} {part.generation} {part.rank} {part.updated_at.isoformat()}"
        return await self._read.get(key, load)


def _spread(parts: Sequence[PartInfo]) -> list[PartInfo]:
    """At most :data:`MOST_READ` parts, with the first and the last rank, of which one has the loss."""
    if len(parts) <= MOST_READ:
        return list(parts)
    return [parts[index * (len(parts) - 1) // (MOST_READ - 1)] for index in range(MOST_READ)]


def _lines(packed: bytes) -> tuple[StepLine, ...]:
    return tuple(
        StepLine(int(entry["step"]), float(entry["seconds"]), entry.get("loss"))
        for entry in unpack(packed)["steps"]
    )
