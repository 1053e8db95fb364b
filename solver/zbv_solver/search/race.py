"""Two chains of a phase race: one search with two seeds, on two threads if the caller allows.

At the end of the race the results are combined in the order of the chains, so threads change the time but not
the plan. :class:`Halt` stops the kernels of a chain, or of the whole search, at a deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import numpy as np

from zbv_solver.kernels.arrays import IntArray
from zbv_solver.search.incumbent import Incumbent, Solution

CHAINS = 2
POLL_SECONDS = 0.05
LEAST_SECONDS = 1e-6
"""Shortest time until a deadline."""


class Halt:
    """Says when to stop: at a deadline, or when ``cancelled`` returns True. A context manager.

    Attributes
    ----------
    flag
        (1,) uint8 that kernels poll; 1 once it is time to stop.
    reason
        "cancelled" or "time limit" once it is time to stop, else None.
    """

    def __init__(self, cancelled: Callable[[], bool] | None, deadline: float | None):
        self.flag: IntArray = np.zeros(1, np.uint8)
        self.reason: str | None = None
        self._cancelled, self._deadline = cancelled, deadline
        self._began = time.monotonic()
        self._finished = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Halt:
        if self._cancelled is not None or self._deadline is not None:
            self._watcher = threading.Thread(target=self._watch, name="halt", daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._watcher is not None:
            self._watcher.join(timeout=1)

    def check(self) -> bool:
        """Whether it is time to stop."""
        if self.reason is None:
            if self._cancelled is not None and self._cancelled():
                self.stop("cancelled")
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self.stop("time limit")
        return self.reason is not None

    def stop(self, reason: str) -> None:
        """Stop now."""
        self.reason = reason
        self.flag[0] = 1

    def spent(self, share: float = 1.0) -> float:
        """Elapsed fraction of the time until the deadline, or of its first ``share``; 0 without one."""
        if self._deadline is None:
            return 0.0
        seconds = self._deadline - self._began
        return (time.monotonic() - self._began) / max(share * seconds, LEAST_SECONDS)

    def within(self, seconds: float | None) -> AbstractContextManager[Halt]:
        """One that also stops after so much time, or this one without such a limit."""
        if seconds is None:
            return nullcontext(self)
        return Halt(self.check, time.monotonic() + seconds)

    def _watch(self) -> None:
        while not self._finished.wait(POLL_SECONDS):
            if self.check():
                return


Chain = Callable[[int, Halt], Iterator[Solution | None]]
"""The orders that a chain finds, by its number, and when it must stop. It yields None where it has found
none, so that it can be stopped there."""


def race(
    chain: Chain, incumbent: Incumbent, halt: Halt, *, workers: int = 1, seconds: float | None = None
) -> list[Solution]:
    """Run the chains; the best of their orders becomes the current one if it is better.

    Returns the best order of each chain, in the order of the chains.

    When a chain meets the bound, every other chain ends once it has made as many steps, so that the plan does
    not depend on which chain was faster. The race takes at most ``seconds``. A single worker runs the chains
    one after another, and they divide that time evenly.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    met: dict[int, int] = {}  # steps after which a chain met the bound

    def run(number: int) -> Solution | None:
        best = None
        running = 1 if workers > 1 else CHAINS - number
        left = None if deadline is None else (deadline - time.monotonic()) / running
        with halt.within(left) as own:
            for step, solution in enumerate(chain(number, own)):
                if solution is not None and (best is None or solution.value < best.value):
                    best = solution
                    incumbent.announce(best)
                    if incumbent.meets_bound(best):
                        met[number] = step
                is_last = any(step >= other for other in met.copy().values())
                if is_last or is_over(incumbent, halt) or own.spent() >= 1:
                    break
        return best

    with ThreadPoolExecutor(min(workers, CHAINS)) as threads:
        try:
            bests = list(threads.map(run, range(CHAINS)))
        except BaseException:
            halt.stop("error")  # the other chain ends, too
            raise
    for number in sorted(range(CHAINS), key=lambda number: (met.get(number, math.inf), number)):
        best = bests[number]
        if best is not None and incumbent.is_improved_by(best.value):
            incumbent.accept(best)
    return [best for best in bests if best is not None]


def is_over(incumbent: Incumbent, halt: Halt) -> bool:
    """Whether a search must end: its order is optimal, or it has one and must stop."""
    return incumbent.best is not None and (incumbent.is_optimal or halt.check())
