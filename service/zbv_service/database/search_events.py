"""The events of searches. The transaction of a change also writes its event.

The number of an event comes from the search's row. The lock on that row orders events: a reader who sees an
event also sees all earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from zbv_service.database.engine import BaseTable
from zbv_service.database.models import SearchEventRow, SearchRow
from zbv_service.records.searches import EventKind, SearchEventDocument

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


def first_event(row: SearchRow) -> SearchEventRow:
    """The first event of a new search; the search's row already counts it."""
    data = _state(row, "submitted")
    return SearchEventRow(search_id=row.id, number=row.last_event, at=row.created_at, kind="state", data=data)


async def tell_state(session: AsyncSession, row: SearchRow, at: datetime, reason: str) -> None:
    """Add the event that a search is queued, runs or was asked to stop, with the reason."""
    await add_event(session, row, at, "state", _state(row, reason))


async def tell_found(session: AsyncSession, row: SearchRow, at: datetime, kind: EventKind) -> None:
    """Tell of a better plan, of a better bound, or of the number of layouts."""
    await add_event(session, row, at, kind, {**_found(row), "seconds": _seconds(row, at)})


async def tell_end(session: AsyncSession, row: SearchRow, at: datetime) -> None:
    """Tell what became of a search; nothing comes after it."""
    data = {"state": row.state, **_found(row), "plan_id": row.plan_id, "error": row.error}
    await add_event(session, row, at, "end", {**data, "seconds": _seconds(row, at)})


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


def _state(row: SearchRow, reason: str) -> dict[str, Any]:
    data = {"state": row.state, "reason": reason, "attempts": row.attempts}
    return {**data, "cancel_requested": row.cancel_requested}


def _found(row: SearchRow) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in ("objective", "lower_bound", "gap", "method")}
    return found if row.progress is None else {**found, "progress": row.progress}


def _seconds(row: SearchRow, at: datetime) -> float | None:
    """Seconds since the search was first started."""
    return None if row.started_at is None else round((at - row.started_at).total_seconds(), 3)


def portions(keys: Iterable[str], size: int = _PER_QUERY) -> Iterator[tuple[str, ...]]:
    """Keys in portions that fit in one statement."""
    remaining = iter(keys)
    while portion := tuple(islice(remaining, size)):
        yield portion
