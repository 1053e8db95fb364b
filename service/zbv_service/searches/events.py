"""Following searches: many readers, one look at the database for all of them.

The events are rows of the database, so that any service can tell them, before and after a restart. Here one
loop reads them, at once when this service changed a search, every :data:`POLL_SECONDS` when another did; and
readers wait for it. A reader is a position in a list that it shares with the other readers of its search:
a slow one holds up nobody and costs no memory.
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
"""How often the events of other services are looked for."""
KEEP_ALIVE_SECONDS = 15.0
"""A reader hears of silence this often, so that it and everything between know that the line is alive."""
HELD_EVENTS = 1000
"""Of each search that is followed so many of its newest events are in memory at least, and twice as many at
most."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Channel:
    """The events of one search that somebody follows; ``grew`` is set, and replaced, when there are more."""

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
        """Begin to look."""
        self._loop = asyncio.create_task(self._forever(), name="zbv-events")

    async def stop(self) -> None:
        """End every reader, and stop."""
        self.hang_up()
        if self._loop is not None:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop

    def hang_up(self) -> None:
        """End every reader: the service is about to stop. They come back to another with their position."""
        self._is_stopping = True
        for channel in self._channels.values():
            channel.wake()

    def changed(self, search_id: str) -> None:
        """Say that a search has a new event, or is gone."""
        if search_id in self._channels:
            self._changed.add(search_id)
            self._woken.set()

    @property
    def readers(self) -> int:
        """How many follow a search now."""
        return sum(channel.readers for channel in self._channels.values())

    async def since(self, search_id: str, number: int) -> list[SearchEvent]:
        """The stored events of a search that come after a number."""
        return await self._table.after({search_id: number})

    async def follow(self, search_id: str, number: int) -> AsyncIterator[Sequence[SearchEvent]]:
        """The events of a search that come after a number, as they come, up to its end.

        Yields nothing, an empty sequence, in between to show that the line is alive. A search that is
        discarded meanwhile ends in state ``discarded``. Ends early when the service stops.
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
                # While nobody follows anything, nothing is looked for.
                await happened(self._woken, POLL_SECONDS if self._channels else None)
                await self._look()
            except DatabaseAway as error:
                logger.warning("%s The events of searches wait for it.", error)
                await asyncio.sleep(POLL_SECONDS)
            except Exception:
                # One failure must not end every stream for good.
                logger.exception("events could not be read; trying again in %g s", POLL_SECONDS)
                await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> None:
        """Read what is new, and pass it on."""
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
        """Give readers what is new of these searches."""
        # A channel's readers may leave at any moment, and others open another one for the same search.
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
        """Of the searches that are followed, those with events that are not here yet, or that are gone."""
        newest = {key: channel.newest for key, channel in self._channels.items() if not channel.is_over}
        numbers = await self._table.last_numbers(newest) if newest else {}
        return {key for key, number in newest.items() if numbers.get(key) != number and key in self._channels}


def event_json(event: SearchEvent) -> dict[str, Any]:
    """An event as JSON: see :mod:`zbv_service.searches.event_documents`."""
    at = event.at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return {"id": event.number, "event": event.kind, "at": at, **event.data}


def _discarded(channel: _Channel) -> SearchEvent:
    """The end of a search of which nothing is stored any more."""
    names = ("objective", "lower_bound", "gap", "method", "plan_id", "error", "seconds")
    data = {"state": "discarded", **dict.fromkeys(names)}
    return SearchEvent(channel.search_id, channel.newest + 1, datetime.now(UTC), "end", data)
