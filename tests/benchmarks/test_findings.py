"""Measured numbers and their targets."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from benchmarks.findings import (
    Finding,
    Target,
    WrongInput,
    at_most,
    findings_json,
    matching,
    median_interval,
    missed,
    paired_ratio,
    quantile,
)


@pytest.mark.parametrize(
    ("rule", "value", "verdict"),
    [
        ("at most", 1.0, "met"),
        ("at most", 1.01, "missed by 0.01"),
        ("at least", 1.0, "met"),
        ("at least", 0.99, "missed by 0.01"),
    ],
)
def test_a_value_meets_its_target(rule: Literal["at most", "at least"], value: float, verdict: str) -> None:
    found = Finding("ratio", value, "", Target(1.0, rule), (0.9, 1.1))
    assert found.verdict == verdict
    assert (found.excess > 0) == verdict.startswith("missed")
    assert len(missed([found])) == verdict.startswith("missed")


def test_a_number_without_a_target_is_never_missed() -> None:
    found = Finding("reported", 12.34, "us")
    assert (found.asked, found.measured, found.verdict, found.excess) == ("", "12.34 us", "", 0.0)


def test_a_missed_target_is_reported_with_the_target_and_the_excess() -> None:
    found = Finding("  peak", 6.5, "%", at_most(5.0))
    assert missed([found]) == ["peak: target ≤ 5 %, measured 6.5 %, missed by 1.5 %"]
    (document,) = findings_json([found])
    assert document["missed_by"] == 1.5
    assert document["target"] == {"limit": 5.0, "rule": "at most"}


def test_names_are_selected_by_a_glob() -> None:
    names = ["p8-web", "p16-web", "p8-tail"]
    assert matching(names, "p8-*", str) == ("p8-web", "p8-tail")
    assert matching(names, None, str) == tuple(names)
    with pytest.raises(WrongInput, match=r"found 'p4-\*', which matches none of the 3 names \(p8-web"):
        matching(names, "p4-*", str)


def test_quantiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile(values[:10], 0.95) == 10.0  # nine of ten values are only 90 %
    assert quantile(values, 0.07) == 7.0
    assert quantile([7.0], 0.99) == quantile([7.0], 0.0) == 7.0


def test_a_disturbance_of_a_round_cancels_in_its_ratio() -> None:
    disturbed = np.random.default_rng(1).uniform(1, 10, size=40)
    ratio, (low, high) = paired_ratio((0.8 * disturbed).tolist(), disturbed.tolist())
    assert (ratio, low, high) == pytest.approx((0.8, 0.8, 0.8))


def test_the_interval_holds_the_median_and_narrows_with_more_rounds() -> None:
    values = np.random.default_rng(2).normal(1.0, 0.1, size=400)
    widths = []
    for count in (20, 400):
        middle, (low, high) = median_interval(values[:count])
        assert low <= middle <= high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
