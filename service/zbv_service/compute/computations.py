"""Bounded computations for requests: in other processes, with a deadline, a memory limit and a fair queue.

Everything that may take longer than some milliseconds runs here: reading, checking and normalising a large
body, verifying and drawing plans, bounds and estimates. The service's own process only passes bytes on, so
it can answer other requests. A process, unlike a thread, can be killed, so a deadline really ends
a computation and releases its memory.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

from zbv_service.compute.processes import IsolatedProcesses, memory_exceeds
from zbv_service.compute.waiting import RETRY_SECONDS, FairQueue, happened, while_client_waits
from zbv_service.documents.parsing import has_more_values, parse_json
from zbv_service.errors import NOT_READY, TOO_MUCH_MEMORY, ApiError
from zbv_service.observability.context import CALLER

T = TypeVar("T")

AT_A_TIME = 3
AT_A_TIME_EACH = 2
"""Most computations of one caller, so that a slot is left for others."""
WAITING = 64
WAITING_EACH = 24
"""Most waiting computations, of all callers and of one caller."""
MEMORY = 1024**3
"""Most bytes that a computation may allocate."""
SMALL = 128 * 1024**2
"""A computation that holds no more bytes than this is not ended for the memory of all."""
LOOK_SECONDS = 0.1
"""Time between two looks at the memory of all."""
SHORT_LIST = 50
"""Lists of up to this many rows are read without queueing."""
ROWS_OF_NODE = 16
"""A run's node with its ranks takes about as long to read as so many rows of a list."""
LIGHT_BYTES = 8192
LIGHT_STAGES = 128
LIGHT_VALUES = 1024
"""A body of at most this size, or decoded with so many values, and with so many stages is read faster than it
could be sent to a process."""


class Computations:
    """Runs functions in other processes, a few at a time.

    Parameters
    ----------
    seconds
        The deadline of each computation, from the start of its turn.
    memory
        Bytes of this process and of all processes of its executors, searches included. Beyond them, the
        computation that holds most is ended.
    """

    def __init__(self, seconds: float, memory: float = math.inf) -> None:
        self._seconds = seconds
        self._memory = memory
        self._ended_for_memory: WeakSet[Future[Any]] = WeakSet()
        self._relieving = threading.Lock()
        self._processes = IsolatedProcesses(memory=MEMORY)
        self._turns = FairQueue(AT_A_TIME, AT_A_TIME_EACH, WAITING, WAITING_EACH)
        self._writing = FairQueue(1, 1, WAITING, WAITING_EACH)
        self._listing = FairQueue(1, 1, WAITING, WAITING_EACH)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="zbv-writer")

    async def run(self, function: Callable[[Any], T], argument: Any, seconds: float | None = None) -> T:
        """Call a function in another process, where it must be importable.

        The computation ends when the client of this request disconnects; see :data:`.CLIENT`.

        Parameters
        ----------
        seconds
            A deadline of this computation that is shorter than that of all; None without one.

        Raises
        ------
        ApiError
            503: too many computations of all callers or of this one are waiting, or this one
            takes too long, loses its process or loses its client. 422: it needs too much memory.
        Exception
            Any error of the function.
        """
        limit = self._seconds if seconds is None else min(self._seconds, seconds)
        return await while_client_waits(self._in_turn(function, argument, limit))

    async def of_body(self, function: Callable[[Any], T], body: bytes | bytearray) -> T:
        """Call a function with a decoded JSON body: in this process if that takes about a millisecond.

        Raises
        ------
        ApiError
            As :meth:`run`. 400: the body is not JSON.
        Exception
            Any error of the function.
        """
        if len(body) <= LIGHT_BYTES:
            document = parse_json(body)
            if is_light(document):
                return function(document)
        return await self.run(_OfText(function), body)

    async def of_document(self, function: Callable[[Any], T], document: Any) -> T:
        """As :meth:`of_body` for a decoded body."""
        is_small = is_light(document) and not has_more_values(document, LIGHT_VALUES)
        return function(document) if is_small else await self.run(function, document)

    async def write(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread with data that is already in memory, such as the rows of a list.

        One call at a time, because threads share the interpreter with all other requests.

        Raises
        ------
        ApiError
            503: too many of all callers or of this one are waiting.
        """
        async with self._writing.turn(CALLER.get() or ""):
            return await asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)

    @asynccontextmanager
    async def listing(self, limit: int) -> AsyncIterator[None]:
        """Within the block, read a list. Long lists queue: forty rows take the event loop a millisecond.

        Raises
        ------
        ApiError
            503: too many of all callers or of this one are waiting.
        """
        if limit <= SHORT_LIST:
            yield
            return
        async with self._listing.turn(CALLER.get() or ""):
            yield

    def stop(self) -> None:
        """Kill the processes."""
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._processes.kill()

    async def _in_turn(self, function: Callable[[Any], T], argument: Any, seconds: float) -> T:
        try:
            async with self._turns.turn(CALLER.get() or ""):
                return await self._in_time(self._processes.submit(function, argument), seconds)
        except BrokenExecutor:
            raise _refused("Its process died, most often because memory ran out.") from None
        except MemoryError:
            # Another attempt would need as much, so this is no 503, which clients repeat.
            raise ApiError(
                TOO_MUCH_MEMORY,
                f"The computation needs more than {MEMORY // 1024**2} MiB of memory, which is this service's "
                f"limit. Compute on your own machine, such as by `zbv export`, or send a smaller problem.",
            ) from None

    async def _in_time(self, future: Future[T], seconds: float) -> T:
        """The result of a started computation.

        At its deadline, or if nobody waits for it any more, its process is killed; the caller's turn lasts
        until it is dead.
        """
        waited = asyncio.wrap_future(future)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # reads it once
        end = time.monotonic() + seconds
        try:
            while not waited.done() and (left := end - time.monotonic()) > 0:
                await asyncio.wait([waited], timeout=min(left, LOOK_SECONDS))
                if not waited.done():
                    await asyncio.to_thread(self._relieve)
        except asyncio.CancelledError:
            await self._end(future)
            raise
        if waited.done():
            if future in self._ended_for_memory and isinstance(waited.exception(), BrokenExecutor):
                raise _refused("Other computations and searches needed its memory.")
            return waited.result()
        await self._end(future)
        whose = "that --computation-seconds sets" if seconds == self._seconds else "of such requests"
        raise _refused(f"It takes longer than {seconds:g} seconds, the limit {whose}.")

    def _relieve(self) -> None:
        """End the largest computation if all processes together hold too much memory."""
        # Two threads that see the same excess would end two computations.
        with self._relieving:
            if not all(ended.done() for ended in self._ended_for_memory):
                return  # its process still releases its memory
            ended = self._processes.kill_largest(SMALL) if memory_exceeds(self._memory) else None
            if ended is not None:
                self._ended_for_memory.add(ended)

    async def _end(self, future: Future[Any]) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        while not ended.is_set():
            # A computation that is still starting has no process to kill yet.
            self._processes.kill_process_of(future)
            await happened(ended, 0.1)


def is_light(document: Any) -> bool:
    """Whether a decoded body of at most ``LIGHT_BYTES`` stays small if its problem is expanded per stage."""
    if not isinstance(document, dict):
        return True
    problem = document.get("problem", document)
    if not isinstance(problem, dict) or "plan" in document:
        return "plan" not in document
    ranks, chunks = problem.get("pp_degree"), problem.get("chunks")
    stages = (ranks if isinstance(ranks, int) else 1) * (chunks if isinstance(chunks, int) else 2)
    # Layouts of a cluster are enumerated when they are counted.
    return stages <= LIGHT_STAGES and "layers" not in problem and "cluster" not in document


@dataclass(frozen=True)
class _OfText:
    """Turns a function of a decoded document into one of its text, importable in another process."""

    function: Callable[[Any], Any]

    def __call__(self, text: bytes | bytearray) -> Any:
        return self.function(parse_json(text))


def _refused(why: str) -> ApiError:
    return ApiError(
        NOT_READY,
        f"The service could not finish this computation: {why} Send a smaller request, or try again later.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )
