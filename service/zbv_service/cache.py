"""A small cache of immutable things that are slow to make, for many readers at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
