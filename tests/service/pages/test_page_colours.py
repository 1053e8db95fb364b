"""The colours of pages: tokens with a light and a dark value, readable in both, the same as in exports."""

from __future__ import annotations

import re
from itertools import product

import pytest
from support.contrast import contrast
from zbv_solver.export.palette import FILLS, INKS
from zbv_solver.export.report import STATIC

STYLE = (STATIC / "zbv.css").read_text(encoding="utf-8")
ROOT, REST = STYLE.split("}", 1)
TOKENS = dict(re.findall(r"^  --([\w-]+): ([^;]*);$", ROOT, re.MULTILINE))

BACKGROUNDS = ("page", "surface", "raised")
# (text, background): at least 4.5:1, WCAG 1.4.3.
TEXT = [
    *product(("text", "muted", "accent", "good", "bad"), BACKGROUNDS),
    ("text", "hover"),
    ("muted", "hover"),
    ("accent-ink", "accent"),
    ("accent-ink", "accent-strong"),
    ("good", "good-back"),
    ("bad", "bad-back"),
    *((f"ink{chunk}", f"{letter}{chunk}") for letter in "fiwb" for chunk in (0, 1)),
]
# (shape, background): at least 3:1, WCAG 1.4.11.
SHAPES = [
    *product(("control", "accent", "limit"), BACKGROUNDS),
    *((f"{letter}{chunk}", "chart") for letter in "fiwb" for chunk in (0, 1)),
]
# Lines between things that are apart anyway, and a tint under a hatch that carries the contrast.
DECORATION = {"line", "idle"}


def colours(theme: str) -> dict[str, str]:
    """The colour tokens as they are in a theme."""
    found = {}
    for name, value in TOKENS.items():
        both = re.fullmatch(r"light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", value)
        if both is not None:
            found[name] = both[1] if theme == "light" else both[2]
        elif re.fullmatch(r"#[0-9a-f]{6}", value):
            found[name] = value
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(theme: str) -> None:
    found = colours(theme)
    for text, background in TEXT:
        ratio = contrast(found[text], found[background])
        assert ratio >= 4.5, f"{text} on {background} has {ratio:.2f}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_shapes_have_enough_contrast(theme: str) -> None:
    found = colours(theme)
    for shape, background in SHAPES:
        ratio = contrast(found[shape], found[background])
        assert ratio >= 2.95, f"{shape} on {background} has {ratio:.2f}"  # 3:1, less 8-bit rounding


def test_every_colour_has_a_contrast_rule() -> None:
    held = {name for pair in (*TEXT, *SHAPES) for name in pair} | DECORATION
    assert set(colours("light")) == held, "add the pairs in which a new token is used"
    others = {name for name in TOKENS if name not in colours("light")}
    assert others == {"shadow", "mono"}, "colours are written as #rrggbb or light-dark(#rrggbb, #rrggbb)"


def test_colours_are_in_tokens_alone() -> None:
    without_comments = re.sub(r"/\*.*?\*/", "", REST, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\([^)]*\)|prefers-color-scheme", without_comments) == []


def test_actions_have_the_same_colours_as_in_exports() -> None:
    found = colours("light")
    for letter, shades in FILLS.items():
        assert tuple(found[f"{letter.lower()}{shade}"] for shade in (0, 1)) == shades
    assert (found["ink0"], found["ink1"]) == INKS
