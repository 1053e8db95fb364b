"""How well predictions order runs, and how well any prediction could."""

from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.published.ranking import Throughput, ceilings, of_layouts, of_runs, spearman


def runs(*measured: tuple[str, float]) -> list[Throughput]:
    """Runs of layouts with measured throughputs; predictions are in the order of the names."""
    return [Throughput(layout, float(ord(layout[0])), value) for layout, value in measured]


def test_ranks_correlate_with_ties() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 0, 1.5, 1.5, 3 and 0, 2, 1, 3: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_two_runs_have_no_correlation() -> None:
    assert of_runs(runs(("a", 1), ("b", 2))) is None
    assert of_layouts(runs(("a", 1), ("b", 2), ("b", 3))) is None
    assert of_runs(runs(("a", 1), ("b", 2), ("c", 3))) == pytest.approx(1)


NOISY = runs(*(("a", value) for value in (90, 93, 97, 100, 104, 107, 110, 113)), ("b", 120), ("c", 140))
"""Runs of a layout differ by up to a quarter."""


def test_runs_far_apart_can_be_ordered_in_spite_of_noise() -> None:
    far = runs(("a", 1), ("b", 2), ("c", 4))
    found = ceilings({("own", "noisy"): NOISY, ("own", "far"): far})
    assert mean(found["own", "far"]) == pytest.approx(1)


def test_runs_nearer_than_the_noise_cannot() -> None:
    near = runs(("a", 100.0), ("b", 100.1), ("c", 100.2), ("d", 100.3))
    found = ceilings({("own", "noisy"): NOISY, ("own", "near"): near, ("other", "near"): near})
    assert mean(found["own", "near"]) < 0.3
    assert mean(found["other", "near"]) == 1  # that system repeats no layout
    assert found == ceilings({("own", "noisy"): NOISY, ("own", "near"): near, ("other", "near"): near})


def test_one_of_the_runs_of_a_layout_is_above_the_other() -> None:
    """They have the same prediction, so part of their order cannot be predicted."""
    found = ceilings({("own", "noisy"): runs(("a", 100), ("a", 101), ("b", 200), ("b", 202))})
    assert min(found["own", "noisy"]) == pytest.approx(4 / 20**0.5)
    assert mean(found["own", "noisy"]) < 0.99


def test_groups_without_a_correlation_have_no_ceiling() -> None:
    equal = [Throughput("a", 1.0, 1.0), Throughput("b", 1.0, 2.0), Throughput("c", 1.0, 3.0)]
    same = [Throughput("a", 1.0, 1.0), Throughput("a", 1.0, 3.0), Throughput("b", 2.0, 2.0)]
    assert ceilings({("own", "equal"): equal, ("own", "few"): runs(("a", 1)), ("own", "same"): same}) == {}
