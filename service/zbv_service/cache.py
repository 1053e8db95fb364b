"""A small cache of immutable things that are slow to make, for many readers at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def wait_a_while(futures: Collection[asyncio.Future[Any]], seconds: float) -> None:
    """Until all are done, or the time is over: those that are not go on, and nobody hears of their failure.

    For what is made by a :class:`Cache`: whoever asks again gets it, or the failure of making it anew.
    """
    if not futures:
        return
    _, unfinished = await asyncio.wait(futures, timeout=seconds)
    for future in unfinished:
        future.add_done_callback(_heard)


def _heard(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


class Cache(Generic[T]):
    """Keeps the most recently used values. Readers of a value that is being made wait for that one."""

    def __init__(self, size: int):
        self._size = size
        self._values: OrderedDict[str, asyncio.Future[T]] = OrderedDict()

    async def get(self, key: str, make: Callable[[], Awaitable[T]]) -> T:
        """The value of a key; made once. A failure to make it is not kept."""
        future = self._values.get(key)
        if future is None:
            # A task of its own, so that a reader who goes away takes nothing from the others.
            future = asyncio.ensure_future(make())
            future.add_done_callback(lambda done: self._drop_failure(key, done))
            self._values[key] = future
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        return await asyncio.shield(future)

    def known(self, key: str) -> T | None:
        """The value of a key, where it is made already."""
        future = self._values.get(key)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        self._values.move_to_end(key)
        return future.result()

    def _drop_failure(self, key: str, done: asyncio.Future[T]) -> None:
        failed = done.cancelled() or done.exception() is not None
        if failed and self._values.get(key) is done:
            del self._values[key]
