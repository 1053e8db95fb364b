"""The contrast of colours, as WCAG 2 defines it."""

from __future__ import annotations

from zbv_solver.export.palette import rgb


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours ``#rrggbb``, from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance, from 0 (black) to 1 (white)."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in rgb(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
