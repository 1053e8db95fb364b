"""The events of searches and runs. The transaction of a change also writes its event.

The number of a search's event comes from the search's row. The lock on that row orders events: a reader who
sees an event also sees all earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from zbv_service.database.engine import BaseTable, columns_of
from zbv_service.database.models import EventRow, RunRow, SearchEventRow, SearchRow
from zbv_service.records.runs import RUN_ENDED, EventDocument
from zbv_service.records.searches import EventKind, SearchEventDocument

MOST_EVENTS = 1000
"""Most events of a run per query."""
KEPT_EVENTS = 1000
"""How many of the newest improvements and bounds of a search are kept; it makes a few per second."""
PRUNED_EVERY = 100
_PER_QUERY = 500
"""Databases limit the number of parameters of a statement."""


class SearchEventTable(BaseTable):
    """The events of one database's searches."""

    async def last_numbers(self, search_ids: Iterable[str]) -> dict[str, int]:
        """The number of each search's newest event; removed searches are left out."""
        found: dict[str, int] = {}
        for ids in portions(search_ids):
            query = select(SearchRow.id, SearchRow.last_event).where(SearchRow.id.in_(ids))
            found.update((search_id, number) for search_id, number in await self._database.rows(query))
        return found

    async def after(self, positions: Mapping[str, int]) -> list[SearchEventDocument]:
        """The events of each search after the given number, in order within each search."""
        row = SearchEventRow

        def find(session: Session) -> list[SearchEventDocument]:
            found: list[SearchEventDocument] = []
            for ids in portions(positions, _PER_QUERY // 2):
                newer = (and_(row.search_id == key, row.number > positions[key]) for key in ids)
                query = select(row).where(or_(*newer))
                query = query.order_by(row.search_id, row.number)
                found.extend(_document(event) for event in session.scalars(query))
            return found

        return await self._database.read(find)

    def removed(self, search_id: str, number: int) -> SearchEventDocument:
        """The last event, with this number, of a search that was removed."""
        names = ("objective", "lower_bound", "gap", "method", "plan_id", "error", "seconds")
        data = {"state": "discarded", **dict.fromkeys(names)}
        return _document(
            SearchEventRow(search_id=search_id, number=number, at=datetime.now(UTC), kind="end", data=data)
        )


def _document(row: SearchEventRow) -> SearchEventDocument:
    return SearchEventDocument(search_id=row.search_id, id=row.number, at=row.at, event=row.kind, **row.data)


RUN_EVENT = columns_of(EventDocument, EventRow)


class RunEventTable(BaseTable):
    """The events of one database's runs. A run that has ended has one more, ``end``, which is not stored."""

    async def last_numbers(self, run_ids: Collection[str]) -> dict[str, int]:
        """The number of each run's newest event; removed runs are left out."""
        newest = select(func.max(EventRow.id)).where(EventRow.run_id == RunRow.id).scalar_subquery()
        found: dict[str, int] = {}
        for ids in portions(run_ids):
            query = select(RunRow.id, RunRow.state, newest).where(RunRow.id.in_(ids))
            for run_id, state, number in await self._database.rows(query):
                found[run_id] = (number or 0) + (state in RUN_ENDED)
        return found

    async def after(self, positions: Mapping[str, int]) -> list[EventDocument]:
        """At most :data:`MOST_EVENTS` events of each run after the given number, in their order."""

        def find(session: Session) -> list[EventDocument]:
            found: list[EventDocument] = []
            for run_id, number in positions.items():
                newer = (EventRow.run_id == run_id, EventRow.id > number)
                query = select(*RUN_EVENT).where(*newer).order_by(EventRow.id).limit(MOST_EVENTS)
                events = [EventDocument(**row._mapping) for row in session.execute(query)]
                state = session.scalar(select(RunRow.state).where(RunRow.id == run_id))
                found += events
                if state in RUN_ENDED and len(events) < MOST_EVENTS:
                    newest = select(func.max(EventRow.id)).where(EventRow.run_id == run_id)
                    last = _end_of(run_id, (session.scalar(newest) or 0) + 1, state)
                    found += [last] if last.id > number else []
            return found

        return await self._database.read(find)

    def removed(self, run_id: str, number: int) -> EventDocument:
        """The last event, with this number, of a run that was removed."""
        return _end_of(run_id, number, "removed")


def _end_of(run_id: str, number: int, state: str) -> EventDocument:
    return EventDocument(id=number, at=datetime.now(UTC), kind="end", detail=state, run_id=run_id)


async def add_event(
    session: AsyncSession, row: SearchRow, at: datetime, kind: EventKind, data: Mapping[str, Any]
) -> None:
    """Add an event in the transaction of its change, which must hold the lock on the search's row."""
    row.last_event += 1
    session.add(SearchEventRow(search_id=row.id, number=row.last_event, at=at, kind=kind, data=dict(data)))
    await session.flush()
    if row.last_event % PRUNED_EVERY == 0:
        await session.execute(
            delete(SearchEventRow).where(
                SearchEventRow.search_id == row.id,
                SearchEventRow.number <= row.last_event - KEPT_EVENTS,
                SearchEventRow.kind.in_(["improvement", "bound", "progress"]),
            )
        )


async def tell_state(session: AsyncSession, row: SearchRow, at: datetime, reason: str) -> None:
    """Add the event that a search is queued, runs or was asked to stop, with the reason."""
    data = {"state": row.state, "reason": reason, "attempts": row.attempts}
    await add_event(session, row, at, "state", {**data, "cancel_requested": row.cancel_requested})


async def tell_found(session: AsyncSession, row: SearchRow, at: datetime, kind: EventKind) -> None:
    """Tell of a better plan, of a better bound, or of the number of layouts."""
    await add_event(session, row, at, kind, _found(row, at))


async def tell_end(session: AsyncSession, row: SearchRow, at: datetime) -> None:
    """Tell what became of a search; nothing comes after it."""
    data = {"state": row.state, **_found(row, at), "plan_id": row.plan_id, "error": row.error}
    await add_event(session, row, at, "end", data)


async def times_since_found(session: AsyncSession, row: SearchRow, reason: str) -> int:
    """How often a search was queued for this reason since its last better plan or bound."""
    of_it = SearchEventRow.search_id == row.id
    found = select(func.max(SearchEventRow.number)).where(
        of_it, SearchEventRow.kind.in_(["improvement", "bound"])
    )
    last = await session.scalar(found) or 0
    query = select(SearchEventRow.data).where(
        of_it, SearchEventRow.kind == "state", SearchEventRow.number > last
    )
    return sum(data["reason"] == reason for data in await session.scalars(query))


def _found(row: SearchRow, at: datetime) -> dict[str, Any]:
    """The best plan and bound so far, and the seconds since the search was first started."""
    data = {name: getattr(row, name) for name in ("objective", "lower_bound", "gap", "method")}
    if row.progress is not None:
        data["progress"] = row.progress
    seconds = None if row.started_at is None else (at - row.started_at).total_seconds()
    return {**data, "seconds": None if seconds is None else round(seconds, 3)}


def portions(keys: Iterable[str], size: int = _PER_QUERY) -> Iterator[tuple[str, ...]]:
    """Keys in portions that fit in one statement."""
    remaining = iter(keys)
    while portion := tuple(islice(remaining, size)):
        yield portion
