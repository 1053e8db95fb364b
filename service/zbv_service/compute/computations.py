"""Computations for requests: in processes of their own, with a deadline, bounded memory and a fair queue.

Whatever may take longer than some milliseconds is computed here: reading, checking and normalising a large
body, verifying and drawing plans, bounds and estimates. The service's own process only passes bytes on, so
it answers other requests meanwhile. A process can be killed, which a thread cannot, so a deadline really ends
a computation and frees what it held.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from zbv_service.compute.fair_queue import NoRoom, Turns
from zbv_service.compute.processes import IsolatedProcesses
from zbv_service.compute.waiting import happened
from zbv_service.documents.parsing import parse_json
from zbv_service.errors import NOT_READY, ProblemError
from zbv_service.observability.context import CALLER, CLIENT_GONE

T = TypeVar("T")

AT_A_TIME = 3
AT_A_TIME_EACH = 2
"""Of one caller, so that a slot is left for another."""
WAITING = 64
WAITING_EACH = 24
"""Computations that may wait, of all callers and of one."""
SECONDS = 120.0
"""How long a computation may take; that of the largest plan takes a quarter of it where nothing else runs."""
MEMORY = 1024**3
"""Bytes that a computation may allocate."""
RETRY_SECONDS = 5
SHORT_LIST = 50
"""Lists of up to this many rows are read without waiting for a turn."""
LIGHT_BYTES = 8192
LIGHT_STAGES = 128
"""A body up to this size, with no more stages than this, is read faster than it is handed to a process."""
LARGE = 1024**2
"""Bytes that travel to and from a process as a file: a pipe would copy them, and everybody would wait."""


class Computations:
    """Runs functions in processes, a few at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._processes = IsolatedProcesses(memory=MEMORY)
        self._turns = Turns(AT_A_TIME, AT_A_TIME_EACH, WAITING, WAITING_EACH)
        self._writing = Turns(1, 1, WAITING, WAITING_EACH)
        self._listing = Turns(1, 1, WAITING, WAITING_EACH)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="zbv-writer")
        # Threads that start processes and read and write files; those of the event loop start searches.
        self._threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="zbv-computations")
        self._folder = tempfile.TemporaryDirectory(prefix="zbv-computations-", ignore_cleanup_errors=True)

    async def run(self, function: Callable[[Any], T], argument: Any) -> T:
        """What a function, importable from another process, makes of its argument.

        Raises
        ------
        ProblemError
            503 when too many computations wait already, of all callers or of this one, and when this one
            takes too long, needs too much memory, or its process dies.
        Exception
            Whatever the function raised.
        """
        async with self._turn(self._turns):
            return await self._compute(function, argument)

    async def for_client(self, function: Callable[[Any], T], argument: Any) -> T:
        """As :meth:`run`, of what only this request's client waits for: it ends when the client leaves."""
        gone = CLIENT_GONE.get()
        if gone is None:
            return await self.run(function, argument)
        made = asyncio.create_task(self.run(function, argument))
        leaving = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait([made, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not made.done():
                made.cancel()
                await asyncio.wait([made])
        if made.cancelled():
            raise _refused("Its client went away.")
        return made.result()

    async def of_body(self, function: Callable[[Any], T], body: bytes | bytearray) -> T:
        """What a function makes of a JSON body: at once where that is a matter of a millisecond.

        Raises
        ------
        ProblemError
            As :meth:`run`, and 400 for what is not JSON.
        Exception
            Whatever the function raised.
        """
        if len(body) <= LIGHT_BYTES:
            document = parse_json(body)
            if is_light(document):
                return function(document)
        return await self.for_client(_OfText(function), body)

    async def of_document(self, function: Callable[[Any], T], document: Any) -> T:
        """As :meth:`of_body`, of a body that is decoded already."""
        return function(document) if is_light(document) else await self.run(function, document)

    async def write(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function makes of what is in memory already, such as the rows of a list, in a thread.

        One at a time: threads share the interpreter with everybody else who is to be answered.

        Raises
        ------
        ProblemError
            503 when too many wait already, of all callers or of this one.
        """
        async with self._turn(self._writing):
            return await asyncio.get_running_loop().run_in_executor(self._writer, function, *arguments)

    @asynccontextmanager
    async def listing(self, limit: int) -> AsyncIterator[None]:
        """Take turns at reading lists: the event loop makes their rows, a millisecond for every forty.

        Raises
        ------
        ProblemError
            503 when too many wait already, of all callers or of this one.
        """
        if limit <= SHORT_LIST:
            yield
            return
        async with self._turn(self._listing):
            yield

    def stop(self) -> None:
        """End the processes, whatever they do."""
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._processes.kill()
        self._processes.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()

    @asynccontextmanager
    async def _turn(self, turns: Turns) -> AsyncIterator[None]:
        try:
            async with turns.turn(CALLER.get() or ""):
                yield
        except NoRoom as error:
            whose = "Your token has" if error.is_own else "This service has"
            raise ProblemError(
                NOT_READY,
                f"{whose} {error.waiting} computations that wait already, as many as may. Send this request "
                f"again in {RETRY_SECONDS} seconds.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            ) from None

    async def _compute(self, function: Callable[[Any], T], argument: Any) -> T:
        folder = tempfile.mkdtemp(dir=self._folder.name)
        try:
            if isinstance(argument, bytes | bytearray) and len(argument) > LARGE:
                argument = await self._in_thread(_Stored.of, argument, folder)
            future = await self._begin(function, argument, folder)
            made = await self._in_time(future)
            if isinstance(made, _Stored):
                made = await self._in_thread(made.take)
            return cast("T", made)
        except BrokenExecutor:
            raise _refused("Its process died, most often because memory ran out.") from None
        except MemoryError:
            raise _refused(f"It needs more than {MEMORY // 1024**2} MiB of memory.") from None
        finally:
            # Nobody took the files of a computation that was ended. A stopped service has removed them.
            with suppress(RuntimeError):
                self._threads.submit(shutil.rmtree, folder, ignore_errors=True)

    async def _begin(self, function: Callable[[Any], T], sent: Any, folder: str) -> Future[Any]:
        """Have a process begin with it; starting one takes the calling thread some milliseconds."""
        beginning = asyncio.ensure_future(
            self._in_thread(self._processes.submit, _call, function, sent, folder)
        )
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await self._end(await beginning)
            raise

    async def _in_time(self, future: Future[Any]) -> Any:
        """The result of a computation that has begun.

        Once its time is over, or nobody waits for it any more, its process is killed; the caller's turn lasts
        until it is dead.
        """
        waited = asyncio.wrap_future(future)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # who cares has it
        try:
            done, _ = await asyncio.wait([waited], timeout=self._seconds)
        except asyncio.CancelledError:
            await self._end(future)
            raise
        if done:
            return waited.result()
        await self._end(future)
        raise _refused(f"It takes longer than {self._seconds:g} seconds.")

    async def _end(self, future: Future[Any]) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        while not ended.is_set():
            # One whose process is still starting has no process yet to kill.
            self._processes.kill_process_of(future)
            await happened(ended, 0.1)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns; a caller that is cancelled waits for its end, too."""
        done = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise


def is_light(document: Any) -> bool:
    """Whether a decoded body of ``LIGHT_BYTES`` stays small when its problem is written out per stage."""
    if not isinstance(document, dict):
        return True
    problem = document.get("problem", document)
    if not isinstance(problem, dict) or "plan" in document:
        return "plan" not in document
    ranks, chunks = problem.get("pp_degree"), problem.get("chunks")
    stages = (ranks if isinstance(ranks, int) else 1) * (chunks if isinstance(chunks, int) else 2)
    return stages <= LIGHT_STAGES and "layers" not in problem


@dataclass(frozen=True)
class _OfText:
    """A function of a decoded document as one of the text; importable from another process."""

    function: Callable[[Any], Any]

    def __call__(self, text: bytes | bytearray) -> Any:
        return self.function(parse_json(text))


@dataclass(frozen=True)
class _Stored:
    """Bytes in a file, on their way from one process to another."""

    path: str

    @classmethod
    def of(cls, content: bytes | bytearray, folder: str) -> _Stored:
        """Write a file."""
        handle, path = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return cls(path)

    def take(self) -> bytes:
        """Read the file, and remove it."""
        content = Path(self.path).read_bytes()
        os.unlink(self.path)
        return content


def _call(function: Callable[[Any], Any], argument: Any, folder: str) -> Any:
    """In the other process: call a function; bytes come and go as files where they are many."""
    made = function(argument.take() if isinstance(argument, _Stored) else argument)
    return _Stored.of(made, folder) if isinstance(made, bytes) and len(made) > LARGE else made


def _refused(why: str) -> ProblemError:
    return ProblemError(
        NOT_READY,
        f"The service does not finish this computation: {why} Ask for something smaller, or try again later.",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )
