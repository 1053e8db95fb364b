"""The benchmark of planning every step: its rows and its targets."""

from __future__ import annotations

import pytest
from zbv_solver.search.step_planner import StepPlanner

from benchmarks.planner import per_step
from benchmarks.planner.per_step import HEADER, per_step_table, runs


def test_a_row_has_times_and_ratios_to_the_quick_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_step, "MICROBATCHES", 8)
    monkeypatch.setattr(per_step, "RANKS", 2)
    monkeypatch.setattr(per_step, "SECONDS", 0.02)
    lines: list[str] = []
    first, ratio = per_step_table(runs()[-2:-1], 4, lines.append)
    header, row = lines
    assert header == HEADER
    assert row.startswith("tail-mem0.6 ")
    assert first.target is not None
    assert ratio.target is not None
    assert 0.8 < ratio.value < 1.2


def test_the_memory_limit_admits_every_step() -> None:
    for each in runs():
        problem, steps = each.steps(6)
        planner = StepPlanner(problem)
        for values in steps:
            planner.problem_of(values).require_feasible()
