"""Numbers as people read them, on pages and in the terminal; ticks of axes.

Four significant digits, narrow spaces between thousands, and units of suitable size: 5.909 s, 74.51 GiB.
JSON documents have plain numbers in the unit of their problem instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from zbv_solver.numerals import NARROW_SPACE
from zbv_solver.numerals import figure as figure
from zbv_solver.numerals import fixed as fixed
from zbv_solver.problem.problem import NANOSECONDS, Units

_BYTES = ("bytes", "byte", "B")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME_UNITS = ("s", "ms", "µs", "ns")
SECONDS = Units(time="s")


def time(value: float, units: Units) -> str:
    """A time in the unit that suits it: ``5.909 s`` for 5909168 µs; units without a known size stay."""
    return timer(value, units)(value)


def timer(typical: float, units: Units) -> Callable[[float], str]:
    """How to write times that are compared with each other: all in the unit that suits one of them."""
    scale, unit = time_scale(abs(typical), units)
    return lambda value: f"{figure(value / scale)} {unit}".rstrip()


def time_scale(highest: float, units: Units) -> tuple[float, str]:
    """The divisor for times up to ``highest``, and the unit of the quotients."""
    unit = NANOSECONDS.get(units.time or "")
    if unit is None or not 0 < highest < math.inf:
        return 1.0, time_unit(units)
    fits = (name for name in _TIME_UNITS if highest * unit >= NANOSECONDS[name])
    name = next(fits, _TIME_UNITS[-1])
    return NANOSECONDS[name] / unit, name


def stated(units: Units) -> Units:
    """The units, each called ``units`` if the problem does not name it; for sentences, not for tables."""
    return Units(time=units.time or "units", memory=units.memory or "units")


def time_unit(units: Units) -> str:
    """The printed name of the time unit; empty if there is none."""
    return "µs" if units.time == "us" else units.time or ""


def spread(values: Sequence[float] | None, write: Callable[[float], str] = figure) -> str:
    """The range of values: ``3``, ``3 to 5``, or ``none`` without values."""
    if not values:
        return "none"
    low, high = min(values), max(values)
    return write(low) if low == high else f"{write(low)} to {write(high)}"


def times(values: Sequence[float] | None, units: Units) -> str:
    """The range of times, with their unit at the end: ``3 to 5 µs``."""
    scale, unit = time_scale(max(values or (0.0,)), units)
    return f"{spread([value / scale for value in values])} {unit}".rstrip() if values else "none"


def memories(values: Sequence[float] | None, units: Units) -> str:
    """The range of memory amounts: ``24 MiB to 1 GiB``."""
    return spread(values, lambda value: memory(value, units))


def titled(name: str, unit: str) -> str:
    """A quantity's name with its unit, for axes and columns: ``time [µs]``."""
    return f"{name} [{unit}]" if unit else name


def memory(value: float, units: Units) -> str:
    """A memory amount with its unit; bytes in a binary unit of suitable size."""
    scale, unit = memory_scale(abs(value), units)
    return f"{figure(value / scale)} {unit}" if unit else figure(value)


def percent(fraction: float, digits: int = 2) -> str:
    """A fraction as a percentage: ``1.25 %``."""
    if not math.isfinite(fraction):
        return "∞" if fraction > 0 else "−∞"
    text = f"{100 * fraction:.{digits}f}"
    # Rounding may leave "-0.00"; drop its sign.
    text = text.lstrip("-") if not text.strip("-0.") else text
    return f"{text}{NARROW_SPACE}%".replace("-", "−")


def relative(value: float, base: float) -> str:
    """How far a value is above (+) or below (−) a base, in percent."""
    if base == 0:
        return percent(0.0, 1) if value == 0 else "∞"
    change = percent(value / base - 1, 1)
    return f"+{change}" if change.strip("−0.%\u202f") and value > base else change


def memory_scale(highest: float, units: Units) -> tuple[float, str]:
    """The divisor for memory amounts up to ``highest``, and the unit of the quotients."""
    if units.memory not in _BYTES:
        return 1.0, units.memory or ""
    exponent = 0
    while highest >= 1024 ** (exponent + 1) and exponent < len(_BYTE_UNITS) - 1:
        exponent += 1
    return float(1024**exponent), _BYTE_UNITS[exponent]


def counted(count: int, word: str) -> str:
    """A count with its noun: ``1 rank``, ``4 microbatches``."""
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{figure(count, 12)} {word if count == 1 else plural}"


def ago(at: datetime) -> str:
    """How long ago a time was, in one unit: ``12 s ago``."""
    seconds = (datetime.now(UTC) - at).total_seconds()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def gigabytes(size: float) -> str:
    """Memory of a device or a model, in the decimal unit of data sheets: ``80 GB``."""
    return f"{figure(size / 1e9, 3)} GB"


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``: at most ``at_most`` + 1."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / at_most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= at_most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
