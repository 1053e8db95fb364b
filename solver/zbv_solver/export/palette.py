"""Colours of schedules: hue by letter, lightness by chunk; shared by SVG, pages and their legends.

The fills were found by a random search in OKLab that maximises the smallest distance between any two of
them as seen with normal vision, protanopia, deuteranopia and tritanopia (Machado 2009), under the condition
that each has a contrast of at least 3:1 against both themes' backgrounds (WCAG 1.4.11). The same fills
therefore serve light and dark. ``tests/solver/export/test_page.py`` holds them to it.
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
"""Lightnesses per letter; the chunks of a rank alternate between them."""

BACKGROUND = "#ffffff"
TEXT = "#1b2230"
MUTED = "#566074"
GRID = "#e4e8ef"
"""Colours around the data of a static picture, which is always light. Pages have theirs in ``zbv.css``."""

KIND_FILLS: tuple[str, ...] = tuple(shade for letter in LETTERS for shade in FILLS[letter])
KIND_INKS: tuple[str, ...] = INKS * len(LETTERS)
"""Fills and inks by kind: ``PALETTE_SHADES * letter code + chunk % PALETTE_SHADES``."""


def rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
