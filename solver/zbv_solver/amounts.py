"""Which numbers are accepted, and when an amount of memory is too much."""

from __future__ import annotations

import math

MAX_NUMBER = 1e15
"""Largest cost or memory figure accepted, so that sums stay far from overflow and float rounding."""
MEMORY_TOLERANCE = 1e-9
"""Share of an amount of memory that the rounding of its sum can explain."""


def exceeds(amount: float, limit: float) -> bool:
    """Whether a memory amount is over a limit, by more than float rounding of its sum can explain."""
    return amount > limit + MEMORY_TOLERANCE * max(abs(amount), abs(limit))


def broken_rule(value: float, signed: bool = False) -> str | None:
    """What is wrong with a number, as a sentence; None where nothing is."""
    if not math.isfinite(value):
        return f"found {value}; must be a finite number."
    if value < 0 and not signed:
        return f"found {value:.15g}; must not be negative."
    if abs(value) > MAX_NUMBER:
        return f"found {value:.15g}; must be at most {MAX_NUMBER:g}. Use a larger unit."
    return None


def delta_rule(forward: float, backward_input: float, backward_weight: float) -> tuple[str, str] | None:
    """What is wrong with the three memory deltas of a stage or layer: the key at fault and a sentence.

    They must be finite. F allocates, W releases, and what is held in between adds up to nothing.
    """
    deltas = (forward, backward_input, backward_weight)
    if abs(sum(deltas)) > MEMORY_TOLERANCE * sum(map(abs, deltas)):
        shown = " + ".join(f"{delta:.15g}" for delta in deltas)
        return "", (
            f"the deltas sum to {sum(deltas):.15g} ({shown}); forward + backward_input + backward_weight "
            f"must be 0, or memory would leak."
        )
    if backward_weight > 0:
        return "/backward_weight", (
            f"found {backward_weight:.15g}; must not be positive: W releases what F and I hold."
        )
    return None
