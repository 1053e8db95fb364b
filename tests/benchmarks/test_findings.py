"""Measured numbers and their targets."""

from __future__ import annotations

import pytest

from benchmarks.findings import Finding, Rule, Target, at_most, findings_json, missed, quantile


def finding(value: float, interval: tuple[float, float] | None, rule: Rule, limit: float = 1.0) -> Finding:
    return Finding("ratio", value, "", Target(limit, rule), interval)


@pytest.mark.parametrize(
    ("rule", "value", "interval", "verdict"),
    [
        ("at most", 1.0, (0.9, 1.1), "met"),
        ("at most", 1.01, (0.9, 1.1), "missed by 0.01"),
        ("at least", 1.0, (0.9, 1.1), "met"),
        ("at least", 0.99, (0.9, 1.1), "missed by 0.01"),
        ("at most within noise", 1.01, (0.99, 1.1), "met within noise"),
        ("at most within noise", 0.99, (0.9, 1.1), "met"),
        ("at most within noise", 1.05, (1.02, 1.1), "missed by 0.05"),
        ("below beyond noise", 0.9, (0.8, 0.99), "met"),
        ("below beyond noise", 0.9, (0.8, 1.02), "missed by 0.02"),
    ],
)
def test_the_rule_selects_the_end_of_the_interval(
    rule: Rule, value: float, interval: tuple[float, float], verdict: str
) -> None:
    found = finding(value, interval, rule)
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


def test_quantiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile(values[:10], 0.95) == 10.0  # nine of ten values are only 90 %
    assert quantile(values, 0.07) == 7.0
    assert quantile([7.0], 0.99) == quantile([7.0], 0.0) == 7.0
