"""Follows the events of searches: one query of the database serves all readers.

Events are rows of the database, so any service can stream them, also after a restart. One loop reads new
rows: at once if this service changed a search, and every :data:`POLL_SECONDS` for changes by other services.
A reader is a position in a list that all readers of a search share. So a slow reader delays nobody and costs
no memory.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from zbv_service.compute.waiting import happened
from zbv_service.database import DatabaseAway, SearchEventTable
from zbv_service.records.searches import SearchEvent

POLL_SECONDS = 0.5
"""Seconds between queries for the events of other services."""
KEEP_ALIVE_SECONDS = 15.0
"""Seconds between signs of life on a silent stream, so that clients and proxies keep the connection."""
HELD_EVENTS = 1000
"""Between this many and twice as many of the newest events of each followed search are kept in memory."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Channel:
    """The events of one followed search; new events set ``grew`` and replace it."""

    search_id: str
    readers: int = 0
    events: list[SearchEvent] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def newest(self) -> int:
        return self.events[-1].number if self.events else 0

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1].kind == "end"

    def after(self, number: int) -> Sequence[SearchEvent]:
        return self.events[bisect_right(self.events, number, key=lambda event: event.number) :]

    def extend(self, events: Sequence[SearchEvent]) -> None:
        self.events.extend(events)
        if len(self.events) > 2 * HELD_EVENTS:
            del self.events[:-HELD_EVENTS]
        self.wake()

    def wake(self) -> None:
        self.grew.set()
        self.grew = asyncio.Event()


class SearchEvents:
    """The events of a service's searches, between :meth:`start` and :meth:`stop`."""

    def __init__(self, table: SearchEventTable):
        self._table = table
        self._channels: dict[str, _Channel] = {}
        self._changed: set[str] = set()
        self._woken = asyncio.Event()
        self._next_poll = 0.0
        self._is_stopping = False
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the loop."""
        self._loop = asyncio.create_task(self._forever(), name="zbv-events")

    async def stop(self) -> None:
        """End all streams, and stop the loop."""
        self.hang_up()
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop

    def hang_up(self) -> None:
        """End all streams because the service stops. Readers reconnect with their position."""
        self._is_stopping = True
        for channel in self._channels.values():
            channel.wake()

    @property
    def is_stopping(self) -> bool:
        """Whether the service is stopping, so that streams must end."""
        return self._is_stopping

    def changed(self, search_id: str) -> None:
        """Notice that a search has a new event or was removed."""
        if search_id in self._channels:
            self._changed.add(search_id)
            self._woken.set()

    @property
    def readers(self) -> int:
        """The number of open streams."""
        return sum(channel.readers for channel in self._channels.values())

    async def since(self, search_id: str, number: int) -> list[SearchEvent]:
        """The stored events of a search after a number."""
        return await self._table.after({search_id: number})

    async def follow(self, search_id: str, number: int) -> AsyncIterator[Sequence[SearchEvent]]:
        """Yield the events of a search after a number as they appear, until the search ends.

        Yields an empty sequence from time to time as a sign of life. If the search is discarded, its last
        event has the state ``discarded``. Returns early when the service stops.
        """
        channel = self._channels.get(search_id)
        if channel is None:
            channel = self._channels[search_id] = _Channel(search_id)
            self.changed(search_id)
        channel.readers += 1
        try:
            while not self._is_stopping:
                grew = channel.grew
                events = channel.after(number)
                if events:
                    number = events[-1].number
                    yield events
                elif channel.is_over:
                    return
                elif not await happened(grew, KEEP_ALIVE_SECONDS):
                    yield ()
        finally:
            channel.readers -= 1
            if not channel.readers:
                del self._channels[search_id]

    async def _forever(self) -> None:
        while True:
            try:
                # Without readers there are no queries.
                await happened(self._woken, POLL_SECONDS if self._channels else None)
                await self._look()
            except DatabaseAway as error:
                logger.warning("%s The events of searches wait for it.", error)
                await asyncio.sleep(POLL_SECONDS)
            except Exception:
                # One failure must not end all streams.
                logger.exception("events could not be read; trying again in %g s", POLL_SECONDS)
                await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> None:
        """Read new events, and pass them to readers."""
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
        """Pass the new events of these searches to their readers."""
        # Readers may leave a channel at any moment, and others may open a new one for the same search.
        channels = {key: self._channels[key] for key in changed if key in self._channels}
        found: dict[str, list[SearchEvent]] = {key: [] for key in channels}
        for event in await self._table.after({key: channel.newest for key, channel in channels.items()}):
            found[event.search_id].append(event)
        silent = [key for key, events in found.items() if not events]
        present = await self._table.last_numbers(silent) if silent else {}
        for key, channel in channels.items():
            is_gone = not found[key] and key not in present
            channel.extend([_discarded(channel)] if is_gone else found[key])

    async def _changed_elsewhere(self) -> set[str]:
        """The followed searches that have unread events or were removed."""
        newest = {key: channel.newest for key, channel in self._channels.items() if not channel.is_over}
        numbers = await self._table.last_numbers(newest) if newest else {}
        return {key for key, number in newest.items() if numbers.get(key) != number and key in self._channels}


def event_json(event: SearchEvent) -> dict[str, Any]:
    """An event as JSON; see :mod:`zbv_service.searches.event_documents`."""
    at = event.at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return {"id": event.number, "event": event.kind, "at": at, **event.data}


def _discarded(channel: _Channel) -> SearchEvent:
    """The last event of a search that was removed from the database."""
    names = ("objective", "lower_bound", "gap", "method", "plan_id", "error", "seconds")
    data = {"state": "discarded", **dict.fromkeys(names)}
    return SearchEvent(channel.search_id, channel.newest + 1, datetime.now(UTC), "end", data)
