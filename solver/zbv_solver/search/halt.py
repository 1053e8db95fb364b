"""Stopping kernels: a flag that they poll, set by a thread at a deadline or a cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from zbv_solver.kernels.arrays import IntArray

POLL_SECONDS = 0.05
LEAST_SECONDS = 1e-6
"""Shortest turn."""


class Halt:
    """Says when a search must stop: at a deadline, or when ``cancelled`` returns True. A context manager.

    Attributes
    ----------
    flag
        (1,) uint8 that kernels poll; 1 once it is time to stop.
    reason
        "cancelled" or "time limit" once the search must stop, else None.
    """

    def __init__(self, cancelled: Callable[[], bool] | None, deadline: float | None):
        self.flag: IntArray = np.zeros(1, np.uint8)
        self.reason: str | None = None
        self._cancelled, self._deadline = cancelled, deadline
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
        """Whether the search must stop now."""
        if self.reason is None:
            if self._cancelled is not None and self._cancelled():
                self.reason = "cancelled"
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self.reason = "time limit"
        if self.reason is not None:
            self.flag[0] = 1
        return self.reason is not None

    def _watch(self) -> None:
        while not self._finished.wait(POLL_SECONDS):
            if self.check():
                return


@dataclass(frozen=True, eq=False)
class Turn:
    """The share of the time in which a chain may run."""

    flag: IntArray
    """(1,) uint8 that kernels poll: 1 once the turn is over."""
    began: float
    seconds: float | None
    """Length of the turn, or None without a time limit."""

    def spent(self, share: float = 1.0) -> float:
        """Elapsed fraction of the turn, or of its first ``share``; 0 without a time limit."""
        if self.seconds is None:
            return 0.0
        return (time.monotonic() - self.began) / max(share * self.seconds, LEAST_SECONDS)
