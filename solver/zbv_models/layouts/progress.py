"""What a search of layouts reports while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

REPORT_SECONDS = 0.2
"""Least time between two reports, except those of a better layout: a report counts the layouts that wait."""
REPORTS_SHARE = 0.05
"""Most of the time that reports of very many layouts take."""


POLL_SECONDS = 0.05


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


@dataclass(frozen=True)
class LayoutProgress:
    """What is known so far.

    Attributes
    ----------
    considered
        Number of layouts that were enumerated.
    ruled_out
        Of these, layouts that do not fit or that cannot be listed, because their bound is too large.
    planned
        Of these, layouts whose pipeline was planned.
    step_time
        Seconds of the best planned layout; None before the first one.
    no_layout_below
        Seconds; no layout has a shorter step.
    """

    considered: int
    ruled_out: int
    planned: int
    step_time: float | None
    no_layout_below: float


class Ends:
    """Whether a search must end: on request, or after its time limit in seconds, which counts from now."""

    def __init__(self, is_stopped: Callable[[], bool], limit: float | None = None) -> None:
        self._is_stopped = is_stopped
        self._at = math.inf if limit is None else time.monotonic() + limit

    def __call__(self) -> bool:
        """Whether the search must end now."""
        return self._is_stopped() or time.monotonic() >= self._at


class News:
    """When it is time for a report."""

    def __init__(self) -> None:
        self.due, self.best = -math.inf, math.inf

    def has(self, best: float) -> bool:
        """Whether the last report is old, or there is a better step; ``best`` is inf without a plan."""
        return best != self.best or time.monotonic() >= self.due

    @contextmanager
    def telling(self, best: float) -> Iterator[None]:
        """Make a report in the block."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.due, self.best = now + max(REPORT_SECONDS, (now - began) / REPORTS_SHARE), best
