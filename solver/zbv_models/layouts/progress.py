"""What a search of layouts reports while it runs, and when it must end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class LayoutProgress:
    """What is known so far."""

    considered: int
    """Number of layouts that were enumerated."""
    ruled_out: int
    """Of these, layouts that do not fit or that cannot be listed, because their bound is too large."""
    planned: int
    """Of these, layouts whose pipeline was planned."""
    step_time: float | None
    """Seconds of the best planned layout; None before the first one."""
    no_layout_below: float
    """Seconds; no layout has a shorter step."""


class Ends:
    """Whether a search must end: on request, or after its time limit in seconds, which counts from now."""

    def __init__(self, is_stopped: Callable[[], bool], limit: float | None = None) -> None:
        self._is_stopped = is_stopped
        self._at = math.inf if limit is None else time.monotonic() + limit

    def __call__(self) -> bool:
        """Whether the search must end now."""
        return self._is_stopped() or time.monotonic() >= self._at


class Poll:
    """Whether a loop of quick steps must end: asks ``cancelled`` from time to time, not at every step."""

    def __init__(self, cancelled: Callable[[], bool] | None):
        self.cancelled = cancelled
        self.is_over = False
        self.due = time.monotonic() + POLL_SECONDS

    def __call__(self) -> bool:
        """Whether the loop must end."""
        if self.cancelled is not None and not self.is_over and time.monotonic() >= self.due:
            self.is_over = self.cancelled()
            self.due = time.monotonic() + POLL_SECONDS
        return self.is_over
