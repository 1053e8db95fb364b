"""Which numbers zbv accepts, and how far rounding may move them: the only place that defines a tolerance.

Every tolerance is relative, to the quantity that its comment names, so that a plan does not depend on the
unit of time or memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

MAX_NUMBER = 1e15
"""Largest cost or memory figure accepted, so that sums stay far from overflow and float rounding."""
MIN_NUMBER = 1e-100
"""Smallest cost or memory figure accepted besides 0. Floats below 1e-308 lose digits, and products of two
figures must stay above that."""
MIN_DELTA = 1e-120
"""Smallest memory delta accepted besides 0. It may be the difference of two figures, which is 0 or at least
the rounding of the smaller one."""

ROUNDING = 1e-12
"""Relative to a sum of times: what the order of its additions can change. Real differences are larger."""
OPTIMAL_GAP = 1e-9
"""Relative to a lower bound: a plan this near is optimal, and one this far below contradicts the bound. A sum
of six million floats, the longest that a plan has, is off by less."""
SAME_METRIC = 1e-7
"""Relative to a metric: a stated and a recomputed one this near agree. Files may hold fewer digits."""
SAME_FIGURE = 1e-6
"""Relative to a figure: published results this near tie, as their authors print few digits."""

MEMORY_TOLERANCE = 1e-9
"""Relative to a limit or an amount of memory: what the verifier accepts above a limit.

A cut is chosen, then its problem is found feasible, then orders are searched, then the verifier looks. Each
of these adds its amounts in another order, so each tolerates twice as much as the one before: what one
accepts, the next accepts as well.
"""
SEARCH_MEMORY = MEMORY_TOLERANCE / 2
"""What the search accepts above a limit."""
FEASIBLE_MEMORY = MEMORY_TOLERANCE / 4
"""What is feasible although it needs more than the limit."""
CUT_MEMORY = MEMORY_TOLERANCE / 8
"""What a cut of layers may need above the limit."""

AMOUNT_ROUNDING = 1e-12
"""Relative to an amount of memory: what a lower bound adds to the memory that is free before it subtracts
amounts, as their difference may be far smaller than the rounding of each."""

INTEGER_ROUNDING = 1e-13
"""Relative to a number: costs this near to multiples of a common unit are such multiples."""
DECIMAL_ROUNDING = 4e-15
"""As :data:`INTEGER_ROUNDING`, where the multiples are so large that others come near by chance."""
STEP_ROUNDING = 1e-6
"""In steps of CP-SAT's grid, whose times are integers: what floats add to an integer."""
LARGEST_DENOMINATOR = 1_000_000
"""Ratios of costs are looked for among fractions with denominators up to this."""
SIGNIFICANT_BITS = 36
"""Of costs without a common unit, the search sees this many bits: 4e-12 of a cost, far below
:data:`OPTIMAL_GAP`, and far above what a change of unit rounds."""


def exceeds(amount: float, limit: float, tolerance: float = MEMORY_TOLERANCE) -> bool:
    """Whether a memory amount is over a limit, by more than float rounding of its sum can explain."""
    return amount > limit + tolerance * max(abs(amount), abs(limit))


def broken_rule(value: float, signed: bool = False) -> str | None:
    """What is wrong with a number, as a sentence; None where nothing is."""
    if not math.isfinite(value):
        return f"found {value}; must be a finite number."
    if value < 0 and not signed:
        return f"found {value:.15g}; must not be negative."
    if abs(value) > MAX_NUMBER:
        return f"found {value:.15g}; must be at most {MAX_NUMBER:g}. Use a larger unit."
    least = MIN_DELTA if signed else MIN_NUMBER
    if 0 < abs(value) < least:
        size = " in size" if signed else ""
        return f"found {value:.15g}; must be 0 or at least {least:g}{size}. Use a smaller unit."
    return None


def delta_rule(
    forward: float, backward_input: float, backward_weight: float, tolerance: float = MEMORY_TOLERANCE
) -> tuple[str, str] | None:
    """What is wrong with the three memory deltas of a stage or layer: the key at fault and a sentence.

    They must be finite. F allocates, W releases, and what is held in between adds up to nothing.
    """
    deltas = (forward, backward_input, backward_weight)
    if abs(sum(deltas)) > tolerance * sum(map(abs, deltas)):
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


def clean_deltas(forward: float, backward_input: float) -> tuple[float, float]:
    """What I and W add to a rank's memory so that F, I and W add up to exactly 0.

    A document states all three, and they add up to 0 only up to rounding (:func:`delta_rule`). Taken as
    stated, every microbatch would leak the difference. W releases what F and I leave; where they leave less
    than nothing, that is rounding, and I releases what F holds.
    """
    left = forward + backward_input
    return (backward_input, -left) if left > 0 else (0.0 - forward, 0.0)


def integer_scale(values: Iterable[float], largest_integer: int) -> float | None:
    """A factor that makes all values integers without a common divisor; None where there is no such factor.

    Changing the unit of the values does not change the integers, but for what rounding decides.

    Parameters
    ----------
    values
        Finite; zeros say nothing.
    largest_integer
        The largest value must not become more than this.
    """
    numbers = np.unique(np.abs(np.fromiter(values, dtype=np.float64)))
    numbers = numbers[numbers > 0]
    if not len(numbers):
        return 1.0
    # Division by a power of two is exact; what is left is between 0 and 1.
    exponent = int(np.frexp(numbers[-1])[1])
    shares = np.ldexp(numbers, -exponent)
    found = _by_ratio(shares, largest_integer) or _by_decimals(shares, largest_integer)
    return None if found is None else math.ldexp(found, -exponent)


def _by_ratio(shares: NDArray[np.float64], largest_integer: int) -> float | None:
    """The factor where every value is a simple fraction of the largest."""
    ratios, common = shares / shares[-1], 1
    while True:
        wrong = _far_from_integers(ratios * common, INTEGER_ROUNDING)
        if wrong is None:
            return common / float(shares[-1])
        denominator = _denominator(float(ratios[wrong]))
        if denominator is None or common % denominator == 0:
            return None
        common = math.lcm(common, denominator)
        if common > largest_integer:
            return None


def _denominator(ratio: float) -> int | None:
    from fractions import Fraction

    near = Fraction(ratio).limit_denominator(LARGEST_DENOMINATOR)
    return near.denominator if abs(float(near) - ratio) <= INTEGER_ROUNDING * ratio else None


def _by_decimals(shares: NDArray[np.float64], largest_integer: int) -> float | None:
    """The factor where the values have few decimals, in some unit that is a power of two."""
    for decimals in range(13):
        room = largest_integer / (float(shares[-1]) * 10.0**decimals)
        if room < 1:
            return None
        factor = math.ldexp(10.0**decimals, math.frexp(room)[1] - 1)
        scaled = shares * factor
        if _far_from_integers(scaled, DECIMAL_ROUNDING) is None:
            return factor / math.gcd(*map(int, np.rint(scaled).tolist()))
    return None


def _far_from_integers(values: NDArray[np.float64], tolerance: float) -> int | None:
    """The index of a positive value that is no positive integer, up to a share of it; None without one."""
    nearest = np.rint(values)
    far = (np.abs(values - nearest) > tolerance * values) | (nearest < 1)
    return int(np.argmax(far)) if far.any() else None


def rounded_to_bits(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values rounded to :data:`SIGNIFICANT_BITS` binary digits each."""
    mantissa, exponent = np.frexp(values)
    digits = np.rint(np.ldexp(mantissa, SIGNIFICANT_BITS))
    rounded: NDArray[np.float64] = np.ldexp(digits, exponent - SIGNIFICANT_BITS)
    return rounded
