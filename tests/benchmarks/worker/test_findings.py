"""A number against what was asked of it."""

from __future__ import annotations

import pytest

from benchmarks.worker.findings import Finding, Rule, Target, findings_json, missed


def finding(value: float, interval: tuple[float, float] | None, rule: Rule, limit: float = 1.0) -> Finding:
    return Finding("ratio", value, "", interval, Target(limit, rule))


@pytest.mark.parametrize(
    ("rule", "value", "interval", "verdict"),
    [
        ("at most", 1.0, (0.9, 1.1), "met"),
        ("at most", 1.01, (0.9, 1.1), "missed by 0.010"),
        ("at most within noise", 1.01, (0.99, 1.1), "met within noise"),
        ("at most within noise", 0.99, (0.9, 1.1), "met"),
        ("at most within noise", 1.05, (1.02, 1.1), "missed by 0.050"),
        ("below beyond noise", 0.9, (0.8, 0.99), "met"),
        ("below beyond noise", 0.9, (0.8, 1.02), "missed by 0.020"),
    ],
)
def test_the_rule_says_which_end_of_the_interval_is_judged(
    rule: Rule, value: float, interval: tuple[float, float], verdict: str
) -> None:
    found = finding(value, interval, rule)
    assert found.verdict == verdict
    assert (found.excess > 0) == verdict.startswith("missed")
    assert len(missed([found])) == verdict.startswith("missed")


def test_a_number_without_target_is_told_and_never_missed() -> None:
    found = Finding("told", 12.34, "us")
    assert (found.asked, found.measured, found.verdict, found.excess) == ("", "12.3 us", "", 0.0)


def test_a_missed_target_is_said_with_what_was_asked_and_by_how_much() -> None:
    found = Finding("peak", 6.5, "%", None, Target(5.0))
    assert missed([found]) == ["peak: asked ≤ 5.00 %, measured 6.50 %, missed by 1.50 %"]
    (document,) = findings_json([found])
    assert document["missed_by"] == 1.5
    assert document["target"] == {"limit": 5.0, "rule": "at most"}
