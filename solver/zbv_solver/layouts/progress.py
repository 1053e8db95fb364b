"""What a search of layouts reports while it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

REPORT_SECONDS = 0.2
"""Least time between two reports, except those of a better layout: a report counts the layouts that wait."""


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
    """Whether a search must end: on request, or after its time limit, which counts once a layout was planned.

    Parameters
    ----------
    is_stopped
        Whether someone asked for the end.
    limit
        Seconds from now; None for no limit.
    """

    def __init__(self, is_stopped: Callable[[], bool], limit: float | None = None) -> None:
        self._is_stopped = is_stopped
        self._at = math.inf if limit is None else time.monotonic() + limit
        self._is_planned = False

    def tell(self, progress: LayoutProgress) -> None:
        """Take note of a report."""
        self._is_planned = self._is_planned or progress.step_time is not None

    def __call__(self) -> bool:
        """Whether the search must end now."""
        return self._is_stopped() or (self._is_planned and time.monotonic() >= self._at)


class News:
    """When it is time for a report."""

    def __init__(self) -> None:
        self.at, self.best = -math.inf, math.inf

    def has(self, best: float) -> bool:
        """Whether the last report is old, or there is a better step; ``best`` is inf without a plan."""
        return best != self.best or time.monotonic() - self.at >= REPORT_SECONDS

    def told(self, best: float) -> None:
        """A report is made now."""
        self.at, self.best = time.monotonic(), best
