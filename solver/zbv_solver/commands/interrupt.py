"""Ctrl-C and SIGTERM while machine code runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

POLL_SECONDS = 0.2


def interruptible(
    work: Callable[[Callable[[], bool]], Result], on_interrupt: Callable[[], None] | None = None
) -> Result:
    """Do work on a thread of its own; it is given a function that says whether to stop.

    Python raises KeyboardInterrupt wherever the main thread happens to be. Where that is a numba kernel
    handing over its results, the process dies of a segmentation fault; no other thread is ever hit.

    Parameters
    ----------
    on_interrupt
        Called at the first Ctrl-C. The work is then asked to stop, and its result is returned as if it had
        ended by itself; a second Ctrl-C raises. Without it, the first one raises.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, once the work has stopped.
    """
    # The work waits for ``go``: Ctrl-C inside of ``submit`` may leave a thread that the pool does not know.
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
            stop.set()  # leaving the pool waits for the work, so whatever ends this must end that


def _wait(future: Future[Result]) -> Result:
    while not future.done():
        wait([future], timeout=POLL_SECONDS)
    return future.result(timeout=0)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: schedulers send it before a job's time is over. Main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
