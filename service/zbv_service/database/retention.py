"""Forgetting: what nobody asks for any more is removed, in portions that hold nobody up.

Plans are never removed: others refer to them by their hash, and they are small beside what is. Services that
do this at the same time take different portions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from zbv_service.database.engine import Database
from zbv_service.database.models import IdempotencyRow, SearchEventRow, SearchRow
from zbv_service.database.run_models import PartRow, RunRow
from zbv_service.records import FINISHED
from zbv_service.runs.records import RUN_ENDED

PORTION = 200


@dataclass(frozen=True)
class Forgotten:
    """How much was removed: searches with their events, and runs that lost their traces and logs."""

    searches: int
    runs: int


class Retention:
    """Removes what is old from one database."""

    def __init__(self, database: Database):
        self._database = database

    async def forget(self, before: datetime, is_enough: Callable[[], bool] = lambda: False) -> Forgotten:
        """Remove searches, and traces and logs of runs, that ended before a moment, until it is enough."""
        searches = runs = 0
        while not is_enough() and (found := await self._forget_searches(before)):
            searches += found
        while not is_enough() and (found := await self._forget_parts(before)):
            runs += found
        return Forgotten(searches, runs)

    async def forget_names(self) -> None:
        """Remove the names of requests that have expired."""
        expired = IdempotencyRow.expires_at <= datetime.now(UTC)
        async with self._database.writing() as session:
            await session.execute(delete(IdempotencyRow).where(expired))

    async def _forget_searches(self, before: datetime) -> int:
        """Remove some; a run that waits for one's plan keeps it, and any other does without."""
        ended = (
            SearchRow.state.in_(sorted(FINISHED)),
            SearchRow.created_at < before,  # which an index has, and which is the case of those that ended
            SearchRow.finished_at < before,
        )
        waited_for = select(RunRow.id).where(RunRow.search_id == SearchRow.id, RunRow.state == "planning")
        old = select(SearchRow.id).where(*ended, ~waited_for.exists()).limit(PORTION)
        if not await self._database.rows(old.limit(1)):
            return 0
        async with self._database.writing() as session:
            ids = (await session.scalars(old.with_for_update(skip_locked=True))).all()
            await remove_searches(session, ids)
        return len(ids)

    async def _forget_parts(self, before: datetime) -> int:
        """Remove the parts of some runs."""
        query = select(PartRow.run_id).distinct().join(RunRow, PartRow.run_id == RunRow.id)
        query = query.where(RunRow.state.in_(sorted(RUN_ENDED)), RunRow.finished_at < before).limit(PORTION)
        ids = [row.run_id for row in await self._database.rows(query)]
        if ids:
            async with self._database.writing() as session:
                await session.execute(delete(PartRow).where(PartRow.run_id.in_(ids)))
        return len(ids)


async def remove_searches(session: AsyncSession, search_ids: Sequence[str]) -> None:
    """Remove searches with their events; runs that had their plan from them keep it."""
    await session.execute(update(RunRow).where(RunRow.search_id.in_(search_ids)).values(search_id=None))
    await session.execute(delete(SearchEventRow).where(SearchEventRow.search_id.in_(search_ids)))
    await session.execute(delete(SearchRow).where(SearchRow.id.in_(search_ids)))
