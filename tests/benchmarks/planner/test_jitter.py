"""``python -m benchmarks jitter``: instances, verdicts and the measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.problems import uniform
from zbv_solver.plans.plan import Spans
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import compare
from zbv_solver.search.jitter import simulate
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from benchmarks.cli import main
from benchmarks.planner import jitter
from benchmarks.planner.jitter import JitterRow, instances, jitter_findings, measure_jitter

QUICK = SearchOptions(effort="quick")


def row(planned: float, chosen: float, fitting: float | None, any: float) -> JitterRow:
    of_planned, of_chosen = (Spans(1.0, p95, 1.0, p95) for p95 in (planned, chosen))
    return JitterRow("x", 1.0, of_planned, of_chosen, fitting, any, 1.0, 2.0)


def test_the_memory_of_1f1b_is_the_larger_limit() -> None:
    problems = dict(instances())
    assert len(problems) == 18
    for name, problem in problems.items():
        fits = {each.name: each.fits for each in compare(problem)}
        assert fits["1f1b"] is name.endswith("_mem1.0")
        assert (problem.objective, problem.pp_degree in (8, 16)) == ("span", True)


def test_the_gain_is_a_mean_and_the_worst_ratio_to_a_fitting_schedule_counts() -> None:
    rows = [row(2.0, 1.9, None, 1.8), row(1.0, 1.0, 1.25, 1.0), row(1.0, 0.99, 0.9, 0.9)]
    gain, smallest, fitting, any_schedule = jitter_findings(rows)
    assert gain.value == pytest.approx(2.0)
    assert gain.verdict == "met"
    assert smallest.value == 0
    assert fitting.value == any_schedule.value == pytest.approx(1.1)
    assert (fitting.verdict, any_schedule.target) == ("missed by 0.1", None)

    gain, *others = jitter_findings(rows[1:2] + [row(1.0, 1.0, None, 2.0)] * 2)
    assert gain.verdict == "missed by 1 %"
    assert [each.verdict for each in others if each.target is not None] == ["met"]


def test_schedules_are_simulated_in_the_same_scenarios() -> None:
    problem = uniform(2, 4, p2p=0.2)
    found = measure_jitter("small", problem, QUICK, scenarios=32)
    ours = [found.planned.p95_span, found.chosen.p95_span]
    of_plan = simulate(search(problem, QUICK), jitter.JITTER, scenarios=32, seed=jitter.SCENARIOS_SEED)
    assert ours[0] == of_plan.spans.p95_span
    p95s = [each.spans.p95_span for each in of_plan.baselines]
    assert (found.fitting, found.any) == (min(p95s), min(p95s))
    assert max(ours) < found.any


def test_the_command_writes_a_row_per_instance_and_the_verdicts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def small() -> tuple[tuple[str, Problem], ...]:
        return (("small", uniform(2, 3)),)

    monkeypatch.setattr(jitter, "instances", small)
    path = tmp_path / "findings.json"
    status = main(["jitter", "--effort", "quick", "--scenarios", "16", "-o", str(path)])
    findings = json.loads(path.read_text())["jitter"]["findings"]
    assert status == (1 if any(each["missed_by"] > 0 for each in findings) else 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["instance", "small"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "other"], "which matches none of the 18 names"),
        (["--scenarios", "0"], "--scenarios: found 0"),
        (["--time-limit", "0"], "/time_limit"),
    ],
)
def test_wrong_input_has_status_2_before_the_first_search(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jitter", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, says in err) == ("", True)
