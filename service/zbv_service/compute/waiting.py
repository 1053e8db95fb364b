"""Waiting: in loops, and with limits for an event, for a client that may leave, for a turn, or for a value.

A turn comes from a bounded fair queue; a value is one that is slow to compute and that several readers want.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from zbv_service.errors import NOT_READY, ApiError

RETRY_SECONDS = 5
T = TypeVar("T")

logger = logging.getLogger(__name__)


async def happened(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, without a limit if ``seconds`` is None; False if it does not happen in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Loops:
    """Steps that repeat in the background until they are stopped; each waits for its next time itself.

    Parameters
    ----------
    expected
        The errors that pass by themselves: the log has only their message.
    seconds
        How long a loop pauses after an error.
    """

    def __init__(self, expected: type[Exception], seconds: float):
        self.stopped = asyncio.Event()
        self._expected = expected
        self._seconds = seconds
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_working(self) -> bool:
        """Whether all loops are alive."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def start(self, steps: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Start a loop for each step, by the name of its task."""
        for name, step in steps.items():
            self._tasks.append(asyncio.create_task(self._repeat(name, step), name=f"zbv-{name}"))

    async def stop(self, seconds: float) -> None:
        """Wait until the loops end by themselves, so that no transaction is interrupted; cancel late ones."""
        self.stopped.set()
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=seconds)
            for task in unfinished:
                task.cancel()

    async def _repeat(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        while not self.stopped.is_set():
            try:
                await step()
            except Exception as error:
                if isinstance(error, self._expected):
                    logger.warning("%s: %s Trying again in %g s.", name, error, self._seconds)
                else:  # one failure must not end the loop
                    logger.exception("%s failed; trying again in %g s", name, self._seconds)
                await happened(self.stopped, self._seconds)


class Client:
    """The client of one request.

    Parameters
    ----------
    receive
        The ASGI function of the request.
    has_body
        Whether the request has a body. Only after it is read can the departure be noticed.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]], has_body: bool = False):
        self.is_answered = False
        """Whether the answer has begun. What continues then, such as a bound for the next reader of a page,
        no longer depends on this client."""
        self._receive = receive
        self._is_body_read = None if not has_body else asyncio.Event()
        self._unread: list[Any] = []

    async def receive(self) -> Any:
        """The ASGI function for the application."""
        if self._unread:
            return self._unread.pop()
        message = await self._receive()
        if self._is_body_read is not None and not message.get("more_body", False):
            self._is_body_read.set()
        return message

    async def departure(self) -> None:
        """Wait until the client disconnects without an answer."""
        if self._is_body_read is not None:
            await self._is_body_read.wait()
        while (message := await self._receive())["type"] != "http.disconnect":
            self._unread = [message]  # of a request without a body; the application may still ask for it
        if self.is_answered:
            await asyncio.Event().wait()  # until this is cancelled


CLIENT: ContextVar[Client | None] = ContextVar("zbv_client", default=None)
"""The client for which the current code runs; None for work that nobody waits for."""


async def while_client_waits(making: Awaitable[T]) -> T:
    """The result of an awaitable, which is cancelled when the client of this request disconnects.

    Raises
    ------
    ApiError
        503: the client has disconnected; nobody reads it.
    Exception
        Any error of the awaitable.
    """
    client = CLIENT.get()
    if client is None or client.is_answered:
        return await making
    made, leaving = asyncio.ensure_future(making), asyncio.create_task(client.departure())
    try:
        await asyncio.wait([made, leaving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not made.done():
            made.cancel()
            await asyncio.wait([made])
    if made.cancelled():
        raise ApiError(NOT_READY, "The client disconnected, so the service ended its computation.")
    return made.result()


class QueueFull(ApiError):
    """503: the queue is full with ``waiting`` entries, all of the same caller if ``is_own``."""

    def __init__(self, waiting: int, is_own: bool):
        whose = "Your token has" if is_own else "This service has"
        super().__init__(
            NOT_READY,
            f"{whose} {waiting} waiting computations, which is the limit. Send this request again in "
            f"{RETRY_SECONDS} seconds.",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
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
        if self._free and caller not in self._queues and self._working[caller] < self._at_a_time_each:
            self._free -= 1
            self._working[caller] += 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._release(caller)

    async def _wait(self, caller: str) -> None:
        """Wait until :meth:`_release` gives the caller a place."""
        theirs = len(self._queues.get(caller, ()))
        if theirs >= self._most_waiting_each:
            raise QueueFull(theirs, is_own=True)
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

    def _release(self, caller: str) -> None:
        """Return a place, and give free places to those who wait, one caller after the other."""
        self._free += 1
        self._working[caller] -= 1
        if not self._working[caller]:
            del self._working[caller]
        # Another round lets a caller that waits alone have several places.
        while self._free and (ready := [c for c in self._queues if self._working[c] < self._at_a_time_each]):
            for waiting in ready[: self._free]:
                turn = self._queues[waiting][0]
                self._forget(waiting, turn)
                if turn.cancelled():
                    continue  # its task was cancelled and has not run yet
                if waiting in self._queues:
                    self._queues.move_to_end(waiting)
                self._free -= 1
                self._working[waiting] += 1
                turn.set_result(None)

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues[caller]
        queue.remove(turn)
        if not queue:
            del self._queues[caller]


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

    def __init__(self, size: int, most_bytes: float = math.inf, weigh: Callable[[T], int] | None = None):
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
            future = self._values[key] = asyncio.get_running_loop().create_task(make(), context=context)
            future.add_done_callback(partial(self._made, key))
        self._values.move_to_end(key)
        if future.done():
            return future.result()
        self._readers[future] += 1
        try:
            return await while_client_waits(asyncio.shield(future))
        finally:
            self._readers[future] -= 1
            if not self._readers[future]:
                del self._readers[future]
                if not future.done():  # without readers, it takes no turn and no process from others
                    future.cancel()
                    if self._values.get(key) is future:
                        del self._values[key]

    def known(self, key: str) -> T | None:
        """The value of a key if it has been computed, else None."""
        future = self._values.get(key)
        if future is None or not future.done() or future.cancelled() or future.exception() is not None:
            return None
        self._values.move_to_end(key)
        return future.result()

    def _made(self, key: str, done: asyncio.Future[T]) -> None:
        """Keep a value, and drop old ones; forget a failure."""
        has_failed = done.cancelled() or done.exception() is not None  # asking for it marks it as retrieved
        if self._values.get(key) is not done:
            return
        if has_failed:
            del self._values[key]
            return
        self._bytes[key] = 0 if self._weigh is None else self._weigh(done.result())
        while len(self._values) > 1 and (
            len(self._values) > self._size or sum(self._bytes.values()) > self._most_bytes
        ):
            oldest, _ = self._values.popitem(last=False)
            self._bytes.pop(oldest, None)


async def wait_a_while(futures: Collection[asyncio.Future[Any]], seconds: float) -> None:
    """Wait for all futures up to a time limit; unfinished ones continue, and their errors are ignored.

    Meant for values of a :class:`Cache`: a later reader gets the value, or the error of another attempt.
    """
    if not futures:
        return
    _, unfinished = await asyncio.wait(futures, timeout=seconds)
    for future in unfinished:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # reads it once
