"""What a search of layouts reports while it runs."""

from __future__ import annotations

import math
import time
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
