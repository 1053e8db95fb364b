"""The benchmark of microbatches that differ: its rows and its targets."""

from __future__ import annotations

import pytest
from zbv_solver.search.options import SearchOptions

from benchmarks.planner.lengths import LAWS, PlanningInstance
from benchmarks.planner.unequal import (
    HEADER,
    Rival,
    UnequalRow,
    unequal_findings,
    unequal_line,
    unequal_table,
)


def row(value: float, *rivals: Rival) -> UnequalRow:
    return UnequalRow(PlanningInstance(LAWS["web"], 4, 16, 0.6), 1.0, value, 0.04, rivals)


def test_a_row_compares_the_plan_with_what_fits_and_with_mean_plans() -> None:
    lines: list[str] = []
    findings = unequal_table(
        [PlanningInstance(LAWS["bimodal"], 4, 6, 0.6)], SearchOptions("quick"), lines.append
    )
    header, line = lines
    assert header == HEADER
    values = line.split()
    assert values[0] == "bimodal-p4-m6-mem0.6"
    assert values[4] in {"dynapipe", "mean-fitting", "v-half", "v-min"}, "others exceed the limit"
    assert float(values[5]) >= 0
    assert findings[0].value == 0
    assert findings[0].verdict == "met"


def test_only_schedules_that_fit_can_win() -> None:
    short, long = Rival("zb-h1", 80, 1.2, fits=False), Rival("dynapipe", 110, 1.0, fits=True)
    mean = Rival("mean-practice", 125, 1.3, fits=False)
    found = row(100, short, long, mean)
    assert found.best == long
    assert unequal_line(found).split()[-4:] == ["–", "20.0", "(1.30)", "–"]
    losses, _, gain, gap, *_ = unequal_findings([found])
    assert (losses.verdict, gain.verdict, gap.verdict) == ("met", "met", "met")
    assert gain.value == pytest.approx(20)
    losses, *_ = unequal_findings([row(100, Rival("zb-h1", 80, 1.0, fits=True), mean)])
    assert losses.value == 1
    assert losses.excess > 0
