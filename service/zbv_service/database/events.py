"""The events of searches and runs: the transaction of a change writes its event, and a feed has its readers.

The number of a search's event comes from the search's row. The lock on that row orders events: a reader who
sees an event also sees all earlier ones.

Events are rows, so any service can stream them, also after a restart. One loop of a feed reads new rows for
all readers: at once if this service noticed a change, and every :data:`POLL_SECONDS` for changes by other
services. A reader is a position in a list that all readers of a search or run share. So a slow reader delays
nobody and costs no memory. Events that are older than the list are read by each reader.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import and_, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from zbv_service.compute.waiting import Loops, happened
from zbv_service.database.engine import BaseTable, DatabaseAway, columns_of
from zbv_service.database.models import EventRow, RunRow, SearchEventRow, SearchRow
from zbv_service.records.runs import RUN_ENDED, EventDocument
from zbv_service.records.searches import EventKind, SearchEventDocument

POLL_SECONDS = 0.5
"""Seconds between queries for the events of other services."""
STOP_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 15.0
"""Seconds between signs of life on a silent stream, so that clients and proxies keep the connection."""
HELD_EVENTS = 1000
"""Between this many and twice as many of the newest events of each followed search are kept in memory."""

MOST_EVENTS = 1000
"""Most events of a run per query."""
KEPT_EVENTS = 1000
"""How many of the newest improvements and bounds of a search are kept; it makes a few per second."""
PRUNED_EVERY = 100
_PER_QUERY = 500
"""Databases limit the number of parameters of a statement."""

E = TypeVar("E", bound=SearchEventDocument | EventDocument)

logger = logging.getLogger(__name__)


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
    session: AsyncSession, row: SearchRow, at: datetime, kind: EventKind, reason: str | None = None
) -> None:
    """Add an event in the transaction of its change, which must hold the lock on the search's row.

    Parameters
    ----------
    kind
        ``state``: the search is queued, runs, or was asked to stop, for a reason. ``improvement``, ``bound``,
        ``progress``: a better plan, a better bound, or more layouts. ``end``: nothing comes after it.
    """
    data: dict[str, Any] = {"state": row.state} if kind in ("state", "end") else {}
    if kind == "state":
        data |= {"reason": reason, "attempts": row.attempts, "cancel_requested": row.cancel_requested}
    else:
        data |= {name: getattr(row, name) for name in ("objective", "lower_bound", "gap", "method")}
        if row.progress is not None:
            data["progress"] = row.progress
        seconds = None if row.started_at is None else (at - row.started_at).total_seconds()
        data["seconds"] = None if seconds is None else round(seconds, 3)
    if kind == "end":
        data |= {"plan_id": row.plan_id, "error": row.error}
    row.last_event += 1
    session.add(SearchEventRow(search_id=row.id, number=row.last_event, at=at, kind=kind, data=data))
    await session.flush()
    if row.last_event % PRUNED_EVERY == 0:
        await session.execute(
            delete(SearchEventRow).where(
                SearchEventRow.search_id == row.id,
                SearchEventRow.number <= row.last_event - KEPT_EVENTS,
                SearchEventRow.kind.in_(["improvement", "bound", "progress"]),
            )
        )


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


def portions(keys: Iterable[str], size: int = _PER_QUERY) -> Iterator[tuple[str, ...]]:
    """Keys in portions that fit in one statement."""
    remaining = iter(keys)
    while portion := tuple(islice(remaining, size)):
        yield portion


class EventSource(Protocol[E]):
    """The stored events of searches or runs."""

    async def last_numbers(self, owners: Collection[str], /) -> dict[str, int]:
        """The number of each owner's newest event; removed owners are left out."""

    async def after(self, positions: Mapping[str, int], /) -> list[E]:
        """The first events of each owner after the given number, in order within each owner."""

    def removed(self, owner: str, number: int, /) -> E:
        """The last event, with this number, of an owner that was removed."""


@dataclass(eq=False)
class _Channel(Generic[E]):
    """The newest events of one followed owner; new events set ``grew`` and replace it."""

    owner: str
    readers: int = 0
    begin: int | None = None
    """The events with larger numbers are here; None before the first look."""
    events: list[E] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def newest(self) -> int:
        return self.events[-1].number if self.events else self.begin or 0

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1].kind == "end"

    def after(self, number: int) -> Sequence[E]:
        return self.events[bisect_right(self.events, number, key=lambda event: event.number) :]

    def extend(self, events: Sequence[E]) -> None:
        self.events.extend(events)
        if len(self.events) > 2 * HELD_EVENTS:
            self.begin = self.events[-HELD_EVENTS - 1].number
            del self.events[:-HELD_EVENTS]
        self.wake()

    def wake(self) -> None:
        self.grew.set()
        self.grew = asyncio.Event()


class EventFeed(Generic[E]):
    """The events of a service's searches or runs, between :meth:`start` and :meth:`stop`."""

    def __init__(self, source: EventSource[E]):
        self._source = source
        self.many = asyncio.Lock()
        """Held while many events are read or encoded. More threads would keep the event loop waiting."""
        self._channels: dict[str, _Channel[E]] = {}
        self._changed: set[str] = set()
        self._woken = asyncio.Event()
        self._next_poll = 0.0
        self._loops = Loops(DatabaseAway, POLL_SECONDS)

    async def start(self) -> None:
        """Start the loop."""
        self._loops.start({"events": self._look})

    async def stop(self) -> None:
        """End all streams, and stop the loop."""
        self.hang_up()
        await self._loops.stop(STOP_SECONDS)

    def hang_up(self) -> None:
        """End all streams because the service stops. Readers reconnect with their position."""
        self._loops.stopped.set()
        self._woken.set()
        for channel in self._channels.values():
            channel.wake()

    def changed(self, owner: str) -> None:
        """Notice that a search or run has a new event or was removed."""
        if owner in self._channels:
            self._changed.add(owner)
            self._woken.set()

    @property
    def readers(self) -> int:
        """The number of open streams."""
        return sum(channel.readers for channel in self._channels.values())

    async def since(self, owner: str, number: int) -> list[E]:
        """The first stored events after a number."""
        return await self._source.after({owner: number})

    async def follow(self, owner: str, number: int) -> AsyncIterator[Sequence[E]]:
        """Yield the events after a number as they appear, until the search or run ends.

        Yields an empty sequence from time to time as a sign of life. The last event of a search or run that
        is removed is that of :meth:`EventSource.removed`. Returns early when the service stops.
        """
        channel = self._channels.get(owner)
        if channel is None:
            channel = self._channels[owner] = _Channel(owner)
            self.changed(owner)
        channel.readers += 1
        try:
            while not self._loops.stopped.is_set():
                grew = channel.grew
                events = await self._older(channel, number) or channel.after(number)
                if events:
                    number = events[-1].number
                    yield events
                    if events[-1].kind == "end":
                        return
                elif channel.is_over:
                    return
                elif not await happened(grew, KEEP_ALIVE_SECONDS):
                    yield ()
        finally:
            channel.readers -= 1
            if not channel.readers:
                del self._channels[owner]

    async def _older(self, channel: _Channel[E], number: int) -> Sequence[E]:
        """The first stored events after a number, if the channel does not reach back to it."""
        while channel.begin is not None and number < channel.begin and not self._loops.stopped.is_set():
            try:
                async with self.many:
                    return await self._source.after({channel.owner: number})
            except DatabaseAway as error:
                logger.warning("%s The streams of events wait for it.", error)
                await asyncio.sleep(POLL_SECONDS)
        return ()

    async def _look(self) -> None:
        """Wait for new events, read them, and pass them to readers."""
        await happened(self._woken, POLL_SECONDS if self._channels else None)  # no readers, no queries
        self._woken.clear()
        now = asyncio.get_running_loop().time()
        changed, self._changed = self._changed, set()
        try:
            if now >= self._next_poll:
                changed |= await self._changed_elsewhere()
                self._next_poll = now + POLL_SECONDS
            await self._pass_on(changed)
        except Exception:
            self._changed |= changed
            raise

    async def _pass_on(self, changed: set[str]) -> None:
        """Pass the new events of these searches or runs to their readers."""
        # Readers may leave a channel at any moment, and others may open a new one for the same search.
        channels = {key: self._channels[key] for key in changed if key in self._channels}
        await self._open([channel for channel in channels.values() if channel.begin is None])
        found: dict[str, list[E]] = {key: [] for key in channels}
        for event in await self._source.after({key: channel.newest for key, channel in channels.items()}):
            found[event.owner].append(event)
        silent = [key for key, events in found.items() if not events]
        present = await self._source.last_numbers(silent) if silent else {}
        for key, channel in channels.items():
            is_gone = not found[key] and key not in present
            channel.extend([self._source.removed(key, channel.newest + 1)] if is_gone else found[key])

    async def _open(self, channels: Sequence[_Channel[E]]) -> None:
        """Let channels begin with the newest event, which may be the last; readers read older ones."""
        numbers = await self._source.last_numbers([each.owner for each in channels]) if channels else {}
        for channel in channels:
            channel.begin = max(0, numbers.get(channel.owner, 0) - 1)

    async def _changed_elsewhere(self) -> set[str]:
        """What has unread events or was removed."""
        newest = {key: channel.newest for key, channel in self._channels.items() if not channel.is_over}
        numbers = await self._source.last_numbers(newest) if newest else {}
        return {key for key, number in newest.items() if numbers.get(key) != number and key in self._channels}
