"""Durations and losses of a run's steps, from the traces of its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zbv_service.compute.computations import Computations
from zbv_service.compute.waiting import Cache
from zbv_service.database import PartTable
from zbv_service.documents.problems import unpack
from zbv_service.records.runs import PartInfo, StepDocument

MOST_READ = 16
"""Most ranks with traces to read, spread over the pipeline: unpacking hundreds of traces takes seconds."""
GENERATIONS = 32
"""The newest generations, of which steps are read."""
CACHED = 512


class RunSteps:
    """Reads steps from traces, each trace once."""

    def __init__(self, parts: PartTable, computations: Computations):
        self._parts = parts
        self._computations = computations
        self._read: Cache[tuple[StepDocument, ...]] = Cache(CACHED)

    async def of(self, run_id: str, index: Sequence[PartInfo]) -> list[StepDocument]:
        """The steps of the first replica, ascending.

        A generation continues from a checkpoint: its steps replace those of earlier ones from there on.
        """
        traces = [part for part in index if part.kind == "trace" and part.replica == 0]
        steps: dict[int, StepDocument] = {}
        for generation in sorted({part.generation for part in traces})[-GENERATIONS:]:
            parts = sorted(
                (part for part in traces if part.generation == generation), key=lambda part: part.rank
            )
            new = _slowest(await asyncio.gather(*(self._of(run_id, part) for part in _spread(parts))))
            begin = min(new, default=0)
            steps = {step: known for step, known in steps.items() if not new or step < begin} | new
        return [steps[step] for step in sorted(steps)]

    async def _of(self, run_id: str, part: PartInfo) -> tuple[StepDocument, ...]:
        async def load() -> tuple[StepDocument, ...]:
            found = await self._parts.read(run_id, part.generation, "trace", [part.rank])
            return await self._computations.run(_steps, found[0].body) if found else ()

        key = f"{run_id} {part.generation} {part.rank} {part.updated_at.isoformat()}"
        return await self._read.get(key, load)


def _slowest(ranks: Sequence[Sequence[StepDocument]]) -> dict[int, StepDocument]:
    """By step: the time of the slowest rank, and the loss of the rank that has it."""
    steps: dict[int, StepDocument] = {}
    for new in (step for rank in ranks for step in rank):
        known = steps.setdefault(new.step, new)
        loss = new.loss if known.loss is None else known.loss
        steps[new.step] = StepDocument(step=new.step, seconds=max(new.seconds, known.seconds), loss=loss)
    return steps


def _spread(parts: Sequence[PartInfo]) -> list[PartInfo]:
    """At most :data:`MOST_READ` parts, with the first and the last rank, of which one has the loss."""
    if len(parts) <= MOST_READ:
        return list(parts)
    return [parts[index * (len(parts) - 1) // (MOST_READ - 1)] for index in range(MOST_READ)]


def _steps(packed: bytes) -> tuple[StepDocument, ...]:
    """The steps of a rank's trace: its curve, and the newest ones, which are complete."""
    trace = unpack(packed)
    points = [*trace.get("curve", ())]
    points += [(entry["step"], entry["seconds"], entry.get("loss")) for entry in trace["steps"]]
    return tuple(
        StepDocument(step=step, seconds=seconds, loss=loss)
        for step, seconds, loss in {point[0]: point for point in points}.values()
    )
