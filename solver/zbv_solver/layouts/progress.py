"""What a search of layouts reports while it runs."""

from __future__ import annotations

from dataclasses import dataclass


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
