"""Reads and writes the artifacts of ranks, traces and logs. Only the latest of each is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.orm import undefer

from zbv_service.database.engine import BaseTable, columns_of, record_of
from zbv_service.database.models import EventRow, NodeRow, PartRow, RunRow
from zbv_service.database.run_end import add_event, change_plan, lock_run
from zbv_service.records.runs import RUN_ENDED, NewPart, PartInfo, PartKind

MAX_NOTED = 1000
"""Most events of one kind per run. Without a limit, a run with bad values would fill the database."""


class PartTable(BaseTable):
    """The traces and logs of one database."""

    async def ranks_of(self, agent_id: str, run_id: str, generation: int) -> range | None:
        """The ranks of an agent in a generation of a run, None if it had none."""
        query = select(NodeRow.node_rank, RunRow.ranks_per_node).join(RunRow, NodeRow.run_id == RunRow.id)
        of_agent = (NodeRow.run_id == run_id, NodeRow.generation == generation, NodeRow.agent_id == agent_id)
        for node_rank, ranks in await self._database.rows(query.where(*of_agent)):
            return range(node_rank * ranks, (node_rank + 1) * ranks)
        return None

    async def put(self, new: NewPart) -> None:
        """Store a part, replacing an earlier one.

        A trace measured with the run's target plan shows that the run has changed to that plan.
        """
        async with self._database.writing() as session:
            run = await lock_run(session, new.run_id)  # also serialises two uploads of the same part
            if run is None:
                return
            await session.merge(PartRow(**asdict(new), updated_at=datetime.now(UTC)))
            is_current = new.generation == run.generation and run.state not in RUN_ENDED
            if not is_current or new.plan_id is None or new.plan_id != run.target_plan_id:
                return
            if new.plan_id == run.plan_id:
                run.target_plan_id = None  # a change of plan that was taken back
            else:
                change_plan(session, run, new.plan_id, f"by step {new.last_step}")

    async def note(self, run_id: str, kind: str, details: Sequence[str]) -> None:
        """Add events to a run: each text once, and at most :data:`MAX_NOTED` of a kind."""
        async with self._database.writing() as session:
            run = await lock_run(session, run_id)  # also serialises two writers of the same event
            if run is None:
                return
            query = select(EventRow.detail).where(EventRow.run_id == run_id, EventRow.kind == kind)
            known = set(await session.scalars(query.limit(MAX_NOTED)))
            new = [detail for detail in dict.fromkeys(details) if detail not in known]
            for detail in new[: MAX_NOTED - len(known)]:
                add_event(session, run_id, kind, detail)
            if new:
                run.updated_at = datetime.now(UTC)

    async def newest_generation(self, run_id: str, kind: PartKind, rank: int | None = None) -> int | None:
        """The newest generation with a part of this kind, of one rank or of any rank."""
        query = select(func.max(PartRow.generation)).where(PartRow.run_id == run_id, PartRow.kind == kind)
        if rank is not None:
            query = query.where(PartRow.rank == rank)
        ((generation,),) = await self._database.rows(query)
        return cast("int | None", generation)

    async def read(
        self, run_id: str, generation: int, kind: PartKind, ranks: Sequence[int] | None = None
    ) -> list[NewPart]:
        """The parts of a kind for these ranks, or for all ranks, in rank order."""
        where = (PartRow.run_id == run_id, PartRow.generation == generation, PartRow.kind == kind)
        query = select(PartRow).where(*where).order_by(PartRow.rank).options(undefer(PartRow.body))
        if ranks is not None:
            query = query.where(PartRow.rank.in_(ranks))
        return await self._database.read(
            lambda session: [record_of(NewPart, row) for row in session.scalars(query)]
        )

    async def index(self, run_id: str) -> list[PartInfo]:
        """The list of a run's parts in all generations, without their content."""
        query = select(*columns_of(PartInfo, PartRow)).where(PartRow.run_id == run_id)
        found = await self._database.rows(query.order_by(PartRow.generation, PartRow.rank))
        return [PartInfo(*row) for row in found]

    async def first_replica(self, run_id: str, generation: int, plan_id: str) -> dict[int, tuple[int, int]]:
        """The first replica's traces of a plan, without their content.

        Returns
        -------
        By pipeline rank: the rank, and the newest step of its trace.
        """
        query = select(PartRow.pp_rank, PartRow.rank, PartRow.last_step).where(
            PartRow.run_id == run_id,
            PartRow.generation == generation,
            PartRow.kind == "trace",
            PartRow.plan_id == plan_id,
            PartRow.replica == 0,
        )
        found = await self._database.rows(query)
        # A trace without a step has no new step.
        return {p: (rank, -1 if step is None else step) for p, rank, step in found if p is not None}
