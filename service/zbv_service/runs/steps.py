"""How long a run's newest steps took, and their losses, as its ranks' traces say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from zbv_service.compute.cache import Cache
from zbv_service.compute.computations import Computations
from zbv_service.documents.packing import unpack
from zbv_service.records.runs import PartInfo
from zbv_service.runs.parts import RunParts

MOST_READ = 16
"""Ranks whose traces are read, spread over the pipeline: unpacking those of hundreds takes seconds."""
CACHED = 512


@dataclass(frozen=True)
class StepLine:
    """A step: seconds of the slowest rank that was read, and the loss where a rank has one."""

    step: int
    seconds: float
    loss: float | None


class RunSteps:
    """Reads them, each trace once."""

    def __init__(self, parts: RunParts, computations: Computations):
        self._parts = parts
        self._computations = computations
        self._read: Cache[tuple[StepLine, ...]] = Cache(CACHED)

    async def newest(self, run_id: str, index: Sequence[PartInfo]) -> tuple[StepLine, ...]:
        """The steps of the newest generation that has traces, ascending; of its first replica."""
        traces = [part for part in index if part.kind == "trace" and part.replica == 0]
        if not traces:
            return ()
        newest = max(part.generation for part in traces)
        mine = sorted((part for part in traces if part.generation == newest), key=lambda part: part.rank)
        chosen = _spread(mine)
        found = await asyncio.gather(*(self._of(run_id, part) for part in chosen))
        steps: dict[int, StepLine] = {}
        for line in (line for lines in found for line in lines):
            known = steps.get(line.step)
            if known is not None:
                loss = line.loss if known.loss is None else known.loss
                line = StepLine(line.step, max(line.seconds, known.seconds), loss)
            steps[line.step] = line
        return tuple(steps[step] for step in sorted(steps))

    async def _of(self, run_id: str, part: PartInfo) -> tuple[StepLine, ...]:
        async def load() -> tuple[StepLine, ...]:
            packed = await self._parts.packed_traces(run_id, part.generation, [part.rank])
            return await self._computations.run(_lines, packed[part.rank]) if part.rank in packed else ()

        key = f"{run_id} {part.generation} {part.rank} {part.updated_at.isoformat()}"
        return await self._read.get(key, load)


def _spread(parts: Sequence[PartInfo]) -> list[PartInfo]:
    """At most :data:`MOST_READ`, the first and the last rank among them: one of these has the loss."""
    if len(parts) <= MOST_READ:
        return list(parts)
    return [parts[index * (len(parts) - 1) // (MOST_READ - 1)] for index in range(MOST_READ)]


def _lines(packed: bytes) -> tuple[StepLine, ...]:
    return tuple(
        StepLine(int(entry["step"]), float(entry["seconds"]), entry.get("loss"))
        for entry in unpack(packed)["steps"]
    )
