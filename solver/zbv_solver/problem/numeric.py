"""Which numbers and sizes zbv accepts, and every numeric tolerance.

Every tolerance is relative to the quantity that its comment names, so that a plan does not depend on the
units of time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from zbv_solver.kernels.jit import FloatArray

MAX_PP_DEGREE = 1024
MAX_CHUNKS = 64
"""Most stages per rank."""
MAX_STAGES = MAX_PP_DEGREE * MAX_CHUNKS
MAX_CELLS = 1 << 21
"""Largest ``pp_degree * microbatches``, such as 256 ranks and 8192 microbatches. With two stages per rank
this is 12.6 million actions: the command plans them in 2 GB of memory, and reads the plan in 2.5 GB."""
MAX_ACTIONS = 6 * MAX_CELLS
"""Most actions of a plan: F, I and W of at most ``2 * MAX_CELLS`` pairs of stage and microbatch."""
MAX_DEVICES = 8
"""Most kinds of devices of a problem by layers."""
MAX_LAYERS = 512
"""Most layers of a model, counting copies."""

MAX_NUMBER = 1e15
"""Largest cost or memory figure, so that sums stay far from overflow and large rounding errors."""
MIN_NUMBER = 1e-100
"""Smallest cost or memory figure other than 0. Floats below 1e-308 lose digits, and products of two figures
must stay above that."""
MIN_DELTA = 1e-120
"""Smallest memory delta other than 0. A delta may be the difference of two figures, which is 0 or at least
the rounding of the smaller one."""

ROUNDING = 1e-12
"""Relative to a sum of times: how much the order of additions can change it. Real differences are larger."""
OPTIMAL_GAP = 1e-9
"""Relative to a lower bound: a plan this close is optimal, and a plan further below contradicts the bound.
The longest sum in a plan adds 17 million floats, if no two of its actions overlap. Even then the rounding
errors would all have to be large and in one direction to come to twice this share."""
SAME_METRIC = 1e-7
"""Relative to a metric: a stated and a recomputed metric agree within this. Files may hold fewer digits."""

COMMUNICATION_ROUNDING = 1e-9
"""Relative to a duration: how far its communication may exceed it. A search rounds both."""

MEMORY_TOLERANCE = 1e-9
"""Relative to a limit or an amount of memory: how far above a limit the verifier accepts.

A plan passes four checks: of its cut, of the problem's feasibility, of the search, and of the verifier. Each
adds amounts in another order, so each tolerates twice as much as the one before, and
accepts everything that the one before accepts.
"""
SEARCH_MEMORY = MEMORY_TOLERANCE / 2
"""How far above a limit the search accepts."""
FEASIBLE_MEMORY = MEMORY_TOLERANCE / 4
"""How far a need may exceed the limit and still count as feasible."""
CUT_MEMORY = MEMORY_TOLERANCE / 8
"""How far above the limit a cut of layers may be."""

AMOUNT_ROUNDING = 1e-12
"""Relative to an amount of memory: lower bounds add this to the free memory before they subtract amounts,
because the difference may be far smaller than the rounding of its terms."""

INTEGER_ROUNDING = 1e-13
"""Relative to a number: costs this close to multiples of a common unit count as multiples."""
DECIMAL_ROUNDING = 4e-15
"""The same for multiples so large that other numbers come close by chance."""
STEP_ROUNDING = 1e-6
"""In steps of CP-SAT's integer grid: how far float rounding may move an integer."""
LARGEST_DENOMINATOR = 1_000_000
"""Largest denominator of the fractions that cost ratios are matched with."""
SIGNIFICANT_BITS = 36
"""Bits of a cost that the search uses when costs have no common unit: a precision of 4e-12, far finer than
:data:`OPTIMAL_GAP` and far coarser than the rounding of a change of units."""


def exceeds(amount: float, limit: float, tolerance: float = MEMORY_TOLERANCE) -> bool:
    """Whether a memory amount exceeds a limit by more than the rounding of its sum."""
    return amount > limit + tolerance * max(abs(amount), abs(limit))


def broken_rule(value: float, signed: bool = False) -> str | None:
    """The rule that a number breaks, as a sentence; None for a valid number."""
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


def first_broken(values: Sequence[float], signed: bool = False) -> tuple[int, str] | None:
    """The index of the first number that breaks a rule, and the rule; None if all numbers are valid.

    Fast where they are: a problem may have a million numbers, and a search makes dozens of copies of it.
    """
    numbers = np.asarray(values, dtype=np.float64)
    sizes = np.abs(numbers) if signed else numbers
    # A number that is not a number fulfils no comparison.
    valid = (sizes == 0) | ((sizes >= (MIN_DELTA if signed else MIN_NUMBER)) & (sizes <= MAX_NUMBER))
    if valid.all():
        return None
    index = int(np.argmin(valid))
    return index, broken_rule(values[index], signed) or ""


def delta_rule(
    forward: float, backward_input: float, backward_weight: float, tolerance: float = MEMORY_TOLERANCE
) -> tuple[str, str] | None:
    """The rule that the memory deltas of a stage or layer break: the key at fault and a sentence; or None.

    The deltas must be finite. F allocates, W releases, and the three sum to 0.
    """
    deltas = (forward, backward_input, backward_weight)
    if abs(sum(deltas)) > tolerance * sum(map(abs, deltas)):
        shown = " + ".join(f"{delta:.15g}" for delta in deltas)
        return "", (
            f"the changes of memory sum to {sum(deltas):.15g} ({shown}); forward + backward_input + "
            f"backward_weight must be 0, or memory would leak."
        )
    if backward_weight > 0:
        return "/backward_weight", (
            f"found {backward_weight:.15g}; must not be positive: W releases what F and I hold."
        )
    return None


def clean_deltas(forward: FloatArray, backward_input: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Memory deltas of I and W such that those of F, I and W sum to exactly 0; arrays of any shape.

    The stated deltas sum to 0 only up to rounding (:func:`delta_rule`), and every microbatch would leak the
    difference. Here W releases exactly what F and I leave. If F and I leave less than 0, which is rounding, I
    releases what F allocated.
    """
    left = forward + backward_input
    return np.where(left > 0, backward_input, 0.0 - forward), np.where(left > 0, -left, 0.0)


def integer_scale(values: Iterable[float], largest_integer: int) -> float | None:
    """A factor that makes all values integers without a common divisor; None if there is none.

    The integers do not depend on the unit of the values, up to rounding.

    Parameters
    ----------
    values
        Finite; zeros are ignored.
    largest_integer
        No value may become larger than this.
    """
    numbers = np.unique(np.abs(np.fromiter(values, dtype=np.float64)))
    numbers = numbers[numbers > 0]
    if not len(numbers):
        return 1.0
    # Division by a power of two is exact. The shares are between 0 and 1.
    exponent = int(np.frexp(numbers[-1])[1])
    shares = np.ldexp(numbers, -exponent)
    found = _by_ratio(shares, largest_integer) or _by_decimals(shares, largest_integer)
    return None if found is None else math.ldexp(found, -exponent)


def _by_ratio(shares: FloatArray, largest_integer: int) -> float | None:
    """The factor if every value is a simple fraction of the largest."""
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


def _by_decimals(shares: FloatArray, largest_integer: int) -> float | None:
    """The factor if the values have few decimals in a unit that is a power of two."""
    for decimals in range(13):
        room = largest_integer / (float(shares[-1]) * 10.0**decimals)
        if room < 1:
            return None
        factor = math.ldexp(10.0**decimals, math.frexp(room)[1] - 1)
        scaled = shares * factor
        if _far_from_integers(scaled, DECIMAL_ROUNDING) is None:
            return factor / math.gcd(*map(int, np.rint(scaled).tolist()))
    return None


def _far_from_integers(values: FloatArray, tolerance: float) -> int | None:
    """The index of a value that is not close to a positive integer; None if all are."""
    nearest = np.rint(values)
    far = (np.abs(values - nearest) > tolerance * values) | (nearest < 1)
    return int(np.argmax(far)) if far.any() else None


def rounded_to_bits(values: FloatArray) -> FloatArray:
    """The values rounded to :data:`SIGNIFICANT_BITS` binary digits each."""
    mantissa, exponent = np.frexp(values)
    digits = np.rint(np.ldexp(mantissa, SIGNIFICANT_BITS))
    rounded: FloatArray = np.ldexp(digits, exponent - SIGNIFICANT_BITS)
    return rounded
