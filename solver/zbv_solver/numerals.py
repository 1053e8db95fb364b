"""How every message writes a number: narrow spaces between thousands, and the unit that the problem names."""

from __future__ import annotations

import math

NARROW_SPACE = "\u202f"
_DIGITS = 12
"""Significant digits of an exact number: sums of a caller's decimals have rounding behind them."""


def figure(value: float, digits: int = 4) -> str:
    """A number with at least ``digits`` significant digits and no superfluous zeros."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    if magnitude >= 12 or magnitude < -6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_without_zeros(mantissa)}e{int(exponent):+d}".replace("-", "−")
    text = _without_zeros(f"{value:,.{max(0, digits - 1 - magnitude)}f}")
    return text.replace(",", NARROW_SPACE).replace("-", "−")


def fixed(value: float, decimals: int = 0) -> str:
    """A number with this many decimals: a count, or a column of a table."""
    return f"{value:,.{decimals}f}".replace(",", NARROW_SPACE)


def exact(value: float, unit: str | None = None) -> str:
    """A number in the unit of its problem, with all digits that matter: a reader compares it with another."""
    return f"{figure(value, _DIGITS)} {'µs' if unit == 'us' else unit or ''}".rstrip()


def plain(value: float) -> str:
    """The same number as JSON has it, to be copied into a document."""
    return f"{value:.{_DIGITS}g}"


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
