"""Handling of Ctrl-C and SIGTERM while kernels run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TypeVar

from zbv_solver.errors import ZbvError

Result = TypeVar("Result")

POLL_SECONDS = 0.2


def interruptible(
    work: Callable[[Callable[[], bool]], Result], on_interrupt: Callable[[], None] | None = None
) -> Result:
    """Run ``work`` on a separate thread; its argument is a function that returns True when it must stop.

    Python raises KeyboardInterrupt on the main thread, wherever that is. If it is in a Numba kernel that
    returns its results, the process crashes with a segmentation fault. Other threads are not interrupted.

    Parameters
    ----------
    on_interrupt
        Called at the first Ctrl-C. The work is then asked to stop, and its result is returned as usual; a
        second Ctrl-C raises. Without this callback, the first Ctrl-C raises.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, once the work has stopped.
    """
    # The work waits for `go`: Ctrl-C inside `submit` may leave a running thread that the pool does not know.
    go, stop = Event(), Event()

    def begin() -> Result:
        while not go.wait(timeout=POLL_SECONDS):
            if stop.is_set():
                raise CancelledError
        return work(stop.is_set)

    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            future = pool.submit(begin)
            go.set()
            try:
                return _wait(future)
            except KeyboardInterrupt:
                if on_interrupt is None:
                    raise
                stop.set()
                on_interrupt()
                return _wait(future)
        finally:
            stop.set()  # leaving the pool waits for the work, so the work must end


class Interruption:
    """The first Ctrl-C ends work early, and the best result so far is kept; a second one ends it at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.is_interrupted = say, False

    def run(self, work: Callable[[Callable[[], bool]], Result]) -> Result:
        """Run work as :func:`interruptible` does; raises KeyboardInterrupt if it ends without any result."""
        try:
            return interruptible(work, self._end)
        except ZbvError:
            if self.is_interrupted:
                raise KeyboardInterrupt("the search ended before it had found a result") from None
            raise

    def _end(self) -> None:
        self.is_interrupted = True
        self.say("interrupted; keeping the best result so far")

    def finish(self, kept: str) -> None:
        """Raise KeyboardInterrupt after Ctrl-C, once the best result is kept: ``the plan written``."""
        if self.is_interrupted:
            raise KeyboardInterrupt(f"the search ended early, and {kept} is the best that it had found")


def _wait(future: Future[Result]) -> Result:
    while not future.done():
        wait([future], timeout=POLL_SECONDS)
    return future.result(timeout=0)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: schedulers send it before the time of a job ends. Main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
