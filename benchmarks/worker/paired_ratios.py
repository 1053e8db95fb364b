"""Ratios of measurements that took turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 0


def paired_ratio(mine: Sequence[float], other: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of the rounds' ratios, and its bootstrap interval (percentiles; Efron 1979).

    A disturbance of a round affects both of its measurements and cancels in their ratio.

    Raises
    ------
    ValueError
        If the two have different lengths, or are empty.
    """
    if len(mine) != len(other) or not mine:
        raise ValueError(f"found {len(mine)} and {len(other)} measurements; both need the same number.")
    return median_interval(np.asarray(mine, dtype=float) / np.asarray(other, dtype=float))


def median_interval(values: NDArray[np.float64]) -> tuple[float, tuple[float, float]]:
    """Return the median of some values, and its bootstrap interval."""
    chosen = np.random.default_rng(_SEED).integers(len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(values[chosen], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return float(np.median(values)), (float(low), float(high))
