"""Computations that somebody waits for, beside the searches: bounded, and in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from typing import Any

from zbv_service.http.problems import NOT_READY, ProblemError
from zbv_service.searches.processes import IsolatedProcesses

AT_A_TIME = 2
WAITING = 32
"""So many computations may wait for the processes that make them; a large one takes some seconds."""


class Aside:
    """Runs functions of a normalised problem document, two at a time: the largest take seconds."""

    def __init__(self) -> None:
        self._processes = IsolatedProcesses()
        self._turn = asyncio.Semaphore(AT_A_TIME)
        self._waiting = 0

    async def run(
        self, function: Callable[[dict[str, Any]], dict[str, Any]], problem: dict[str, Any]
    ) -> dict[str, Any]:
        """What a function, importable from another process, makes of a problem document.

        Raises
        ------
        ProblemError
            503 when too many others wait already, or the process died.
        """
        if self._waiting >= WAITING:
            raise ProblemError(
                NOT_READY,
                f"{WAITING} computations wait already; send this one again in some seconds.",
                headers={"Retry-After": "5"},
            )
        self._waiting += 1
        try:
            async with self._turn:
                # Starting a process takes the calling thread some milliseconds, so it is not this one.
                future = await asyncio.to_thread(self._processes.submit, function, problem)
                return await asyncio.wrap_future(future)
        except BrokenExecutor:
            raise ProblemError(
                NOT_READY,
                "The process that computed it died; most often memory ran out. Try fewer microbatches.",
            ) from None
        finally:
            self._waiting -= 1

    def stop(self) -> None:
        """End the processes, whatever they do."""
        self._processes.kill()
        self._processes.shutdown(wait=False, cancel_futures=True)
