"""A bounded fair queue: callers take turns, however many requests each one sends."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class QueueFull(Exception):
    """The queue is full with ``waiting`` entries, all of the same caller if ``is_own``."""

    def __init__(self, waiting: int, is_own: bool):
        super().__init__(f"{waiting} wait already.")
        self.waiting = waiting
        self.is_own = is_own


class FairQueue:
    """Lets a few callers work at a time, and serves waiting callers round-robin.

    Parameters
    ----------
    at_a_time, at_a_time_each
        Most turns at the same time, of all callers and of one caller.
    waiting, waiting_each
        Most waiting turns, of all callers and of one caller.
    """

    def __init__(self, at_a_time: int, at_a_time_each: int, waiting: int, waiting_each: int):
        self._free = at_a_time
        self._at_a_time_each = at_a_time_each
        self._most_waiting = waiting
        self._most_waiting_each = waiting_each
        self._working: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of waiting turns."""
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a caller's turn; it lasts as long as the block. Raises :class:`QueueFull`."""
        await self._wait(caller)
        try:
            yield
        finally:
            self._release(caller)

    async def _wait(self, caller: str) -> None:
        own = self._queues.get(caller, ())
        if self._free and not own and self._working[caller] < self._at_a_time_each:
            self._take(caller)
            return
        if len(own) >= self._most_waiting_each:
            raise QueueFull(len(own), is_own=True)
        if self.waiting >= self._most_waiting:
            raise QueueFull(self.waiting, is_own=False)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(caller)  # it was given at the same moment
            elif turn in self._queues.get(caller, ()):
                self._forget(caller, turn)
            raise

    def _take(self, caller: str) -> None:
        self._free -= 1
        self._working[caller] += 1

    def _release(self, caller: str) -> None:
        self._free += 1
        self._working[caller] -= 1
        if not self._working[caller]:
            del self._working[caller]
        self._give()

    def _give(self) -> None:
        """Give free places to those who wait, one caller after the other."""
        for caller in list(self._queues):
            if not self._free:
                return
            if self._working[caller] >= self._at_a_time_each:
                continue
            turn = self._queues[caller][0]
            self._forget(caller, turn)
            if turn.cancelled():
                continue  # its task was cancelled and has not run yet; its next call releases the place
            if caller in self._queues:
                self._queues.move_to_end(caller)
            self._take(caller)
            turn.set_result(None)
        # A caller alone may have several places.
        if self._free and any(self._working[each] < self._at_a_time_each for each in self._queues):
            self._give()

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues[caller]
        queue.remove(turn)
        if not queue:
            del self._queues[caller]
