"""Round numbers on an axis."""

from __future__ import annotations

import math


def ticks(length: float, at_most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 up to ``length``: at most ``at_most`` and 0."""
    if length <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(length / at_most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if length / (power * factor) <= at_most)
    return [index * step for index in range(int(length / step + 1e-9) + 1)]
