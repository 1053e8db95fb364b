"""The colours are distinguishable: on both backgrounds, and with every common kind of colour vision."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from support.contrast import contrast
from zbv_solver.export.palette import (
    BACKGROUND,
    FILLS,
    INKS,
    KIND_FILLS,
    MUTED,
    NAMES,
    TEXT,
    rgb,
)
from zbv_solver.problem.problem import LETTERS

# Machado, Oliveira, Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
DISTINGUISHABLE = 0.07
"""OKLab distance; about 0.02 is just noticeable side by side."""


def seen(colour: str, vision: NDArray[np.float64]) -> NDArray[np.float64]:
    """A colour in OKLab, as seen with this vision."""
    channel = np.array(rgb(colour)) / 255
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    lab: NDArray[np.float64] = TO_LAB @ np.cbrt(TO_LMS @ np.clip(vision @ linear, 0, 1))
    return lab


@pytest.mark.parametrize("vision", VISION)
def test_any_two_fills_differ(vision: str) -> None:
    for one, other in combinations(KIND_FILLS, 2):
        distance = np.linalg.norm(seen(one, VISION[vision]) - seen(other, VISION[vision]))
        assert distance >= DISTINGUISHABLE, f"{one} and {other}"


def test_a_static_picture_is_readable_on_its_background() -> None:
    for text in (TEXT, MUTED):
        assert contrast(text, BACKGROUND) >= 4.5
    for colour in KIND_FILLS:
        assert contrast(colour, BACKGROUND) >= 2.98, colour  # 3:1 of WCAG 1.4.11, less 8-bit rounding


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("letter", LETTERS)
def test_numbers_on_an_action_are_readable(letter: str, chunk: int) -> None:
    assert contrast(FILLS[letter][chunk], INKS[chunk]) >= 4.5


def test_every_letter_has_a_name_and_fills() -> None:
    assert set(NAMES) == set(FILLS) == set(LETTERS)


def test_contrast_is_computed_as_in_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
