"""Ratios of measurements that took turns."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.worker.paired_ratios import median_interval, paired_ratio


def test_a_disturbance_of_a_round_cancels_in_its_ratio() -> None:
    disturbed = np.random.default_rng(1).uniform(1, 10, size=40)
    ratio, (low, high) = paired_ratio((0.8 * disturbed).tolist(), disturbed.tolist())
    assert ratio == pytest.approx(0.8)
    assert (low, high) == pytest.approx((0.8, 0.8))


def test_the_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    values = np.random.default_rng(2).normal(1.0, 0.1, size=400)
    widths = []
    for count in (20, 400):
        middle, (low, high) = median_interval(values[:count])
        assert low <= middle <= high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    assert median_interval(values) == median_interval(values)


@pytest.mark.parametrize(("mine", "other"), [([1.0], [1.0, 2.0]), ([], [])])
def test_unpaired_measurements_are_refused(mine: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match="same number"):
        paired_ratio(mine, other)
