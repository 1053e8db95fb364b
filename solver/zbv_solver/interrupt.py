"""Ctrl-C while machine code runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

Result = TypeVar("Result")

POLL_SECONDS = 0.2


def interruptible(work: Callable[[Callable[[], bool]], Result]) -> Result:
    """Do work on a thread of its own; it is given what says whether to stop.

    Python raises KeyboardInterrupt wherever the main thread happens to be. Where that is a numba kernel
    handing over its results, the process dies of a segmentation fault; no other thread is ever hit.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, once the work has stopped.
    """
    # The work waits for the word: Ctrl-C inside of ``submit`` may leave a thread that the pool does not know.
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
            while not future.done():
                wait([future], timeout=POLL_SECONDS)
            return future.result(timeout=0)
        finally:
            stop.set()  # leaving the pool waits for the work, so whatever ends this must end that
