"""Readable numbers: four significant digits, narrow spaces between thousands, units."""

from __future__ import annotations

import math

from zbv_solver.problem.problem import Units

_NARROW_SPACE = "\u202f"
_BYTES = ("bytes", "byte", "B")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def figure(value: float, digits: int = 4) -> str:
    """A number with at least ``digits`` significant digits and no superfluous zeros."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    if magnitude >= 12 or magnitude < -6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_without_zeros(mantissa)}e{int(exponent):+d}".replace("-", "−")
    text = _without_zeros(f"{value:,.{max(0, digits - 1 - magnitude)}f}")
    return text.replace(",", _NARROW_SPACE).replace("-", "−")


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def time(value: float, units: Units) -> str:
    """A time with its unit."""
    unit = time_unit(units)
    return f"{figure(value)} {unit}" if unit else figure(value)


def time_unit(units: Units) -> str:
    """The printed name of the time unit; empty if there is none."""
    return "µs" if units.time == "us" else units.time or ""


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
    return f"{text}{_NARROW_SPACE}%".replace("-", "−")


def relative(value: float, base: float) -> str:
    """How far a value is above (+) or below (−) a base, in percent."""
    if base == 0:
        return percent(0.0, 1) if value == 0 else "∞"
    change = percent(value / base - 1, 1)
    return change if change.startswith("−") or value <= base else f"+{change}"


def memory_scale(highest: float, units: Units) -> tuple[float, str]:
    """The divisor for memory amounts up to ``highest``, and the unit of the quotients."""
    if units.memory not in _BYTES:
        return 1.0, units.memory or ""
    exponent = 0
    while highest >= 1024 ** (exponent + 1) and exponent < len(_BYTE_UNITS) - 1:
        exponent += 1
    return float(1024**exponent), _BYTE_UNITS[exponent]
