"""Colours of schedules: hue by letter, lightness by chunk; shared by SVG, pages and their legends.

The fills were found by a random search in OKLab that maximises the smallest distance between any two of
them as seen with normal vision, protanopia, deuteranopia and tritanopia (Machado 2009), under the condition
that each has a contrast of at least 3:1 against both themes' backgrounds (WCAG 1.4.11). The same fills
therefore serve light and dark. ``tests/solver/export/test_palette.py`` holds them to it.
"""

from __future__ import annotations

from zbv_solver.problem.problem import LETTERS

FILLS: dict[str, tuple[str, str]] = {
    "F": ("#3e6ad4", "#4796fb"),
    "I": ("#885303", "#b4782f"),
    "W": ("#0a6e5d", "#279a78"),
    "B": ("#a94899", "#d86ebc"),
}
"""Fill of an action by letter, then by chunk (even, odd)."""

INKS: tuple[str, str] = ("#ffffff", "#0b0e14")
"""Text on a fill, by chunk (even, odd)."""

NAMES: dict[str, str] = {
    "F": "forward",
    "I": "backward, input gradient",
    "W": "backward, weight gradient",
    "B": "full backward",
}

PALETTE_SHADES = 2


BACKGROUND = "#ffffff"
TEXT = "#1b2230"
MUTED = "#566074"
GRID = "#e4e8ef"
"""Colours around the data of a static picture, which is always light. Pages have theirs in ``zbv.css``."""


def shade(chunk: int) -> int:
    """Index of a chunk's lightness: chunks beyond the second alternate."""
    return chunk % PALETTE_SHADES


def fill(letter: str, chunk: int) -> str:
    """Fill colour of an action, ``#rrggbb``."""
    return FILLS[letter][shade(chunk)]


def ink(chunk: int) -> str:
    """Colour of text on an action of this chunk."""
    return INKS[shade(chunk)]


def kind(letter: int, chunk: int) -> int:
    """Index of an action's fill in :data:`KIND_FILLS`, from its letter code."""
    return PALETTE_SHADES * letter + shade(chunk)


KIND_FILLS: tuple[str, ...] = tuple(
    FILLS[letter][lightness] for letter in LETTERS for lightness in range(PALETTE_SHADES)
)
"""All fills, indexed by :func:`kind`."""

KIND_INKS: tuple[str, ...] = INKS * len(LETTERS)


def rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2, from 0 (black) to 1 (white)."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in rgb(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2, from 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
