"""A small cache of immutable values that are slow to compute, for concurrent readers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from zbv_service.compute.waiting import while_client_waits
from zbv_service.observability.context import CLIENT

T = TypeVar("T")


async def wait_a_while(futures: Collection[asyncio.Future[Any]], seconds: float) -> None:
    """Wait for all futures up to a time limit; unfinished ones continue, and their errors are ignored.

    Meant for values of a :class:`Cache`: a later reader gets the value, or the error of another attempt.
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
    """Keeps the most recently used values. Concurrent readers of a missing value share one computation.

    The computation of a value ends when its last reader leaves: when its task is cancelled, or when the
    client of its request disconnects.

    Parameters
    ----------
    size
        The largest number of values.
    most_bytes, weigh
        The most bytes of all values, and the function that measures one. The oldest values go first; the
        newest always stays.
    """

    def __init__(self, size: int, most_bytes: float = math.inf, weigh: Callable[[T], int] = lambda _: 0):
        self._size = size
        self._most_bytes = most_bytes
        self._weigh = weigh
        self._values: OrderedDict[str, asyncio.Future[T]] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._readers: Counter[asyncio.Future[T]] = Counter()

    async def get(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The value of a key, computed once. A failure is not cached."""
        future = self._values.get(key)
        if future is None:
            # A separate task, so that a reader that leaves does not end it for the others.
            context = copy_context()
            context.run(CLIENT.set, None)
            future = asyncio.get_running_loop().create_task(make(), context=context)
            future.add_done_callback(lambda done: self._made(key, done))
            self._values[key] = future
            self._drop_old()
        else:
            self._values.move_to_end(key)
        if future.done():
            return future.result()
        self._readers[future] += 1
        try:
            return await while_client_waits(_result(future))
        finally:
            self._readers[future] -= 1
            if not self._readers[future]:
                del self._readers[future]
                self._end(key, future)

    def known(self, key: str) -> T | None:
        """The value of a key if it has been computed, else None."""
        future = self._values.get(key)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        self._values.move_to_end(key)
        return future.result()

    def _end(self, key: str, future: asyncio.Future[T]) -> None:
        """End a computation without readers, so that it takes no turn and no process from others."""
        if not future.done():
            future.cancel()
            if self._values.get(key) is future:
                del self._values[key]

    def _made(self, key: str, done: asyncio.Future[T]) -> None:
        failed = done.cancelled() or done.exception() is not None  # asking for it marks it as retrieved
        if self._values.get(key) is not done:
            return
        if failed:
            del self._values[key]
        else:
            self._bytes[key] = self._weigh(done.result())
            self._drop_old()

    def _drop_old(self) -> None:
        while len(self._values) > 1 and (
            len(self._values) > self._size or sum(self._bytes.values()) > self._most_bytes
        ):
            key, _ = self._values.popitem(last=False)
            self._bytes.pop(key, None)


async def _result(future: asyncio.Future[T]) -> T:
    return await asyncio.shield(future)
