"""Plans: identity, documents, and refused documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cuts import layered
from support.problems import uniform, uniform_document
from zbv_solver.bounds import Bound
from zbv_solver.commands.cli import main
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import ContradictedBound, InvalidInput
from zbv_solver.frontiers.frontier import frontier_points
from zbv_solver.improve.cp_sat import Grid
from zbv_solver.improve.cp_search import refine
from zbv_solver.plans.plan import Plan, certify, gap_of, plan_json, verdict
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(uniform(2, 4, limit=4), SearchOptions(effort="quick"))


def test_identity_is_the_hash_of_problem_and_ranks(plan: Plan) -> None:
    document = plan_json(plan)
    text = json.dumps(
        {"problem": document["problem"], "ranks": document["ranks"]}, sort_keys=True, separators=(",", ":")
    )
    assert plan.plan_id == document["plan_id"] == hashlib.sha256(text.encode()).hexdigest()


def test_identity_does_not_depend_on_how_the_plan_was_found(plan: Plan) -> None:
    other = replace(plan, provenance=replace(plan.provenance, seconds=9.0, method="other"), baselines=())
    assert other.plan_id == plan.plan_id


def test_documents_round_trip(plan: Plan) -> None:
    document = json.loads(json.dumps(plan_json(plan)))
    assert plan_json(parse_plan(document)) == document


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"ranks": [["0F0"]]}, "/ranks"),
        ({"ranks": "0F0"}, "/ranks"),
        ({"ranks": [["0F0"], [7]]}, "/ranks/1/0"),
        ({"ranks": [["0F0"], ["zz"]]}, "/ranks/1/0"),
        ({"ranks": [["0F0"], ["1F0"]]}, "/plan_id"),
        ({"plan_id": "0" * 64}, "/plan_id"),
        ({"objective": "makespan"}, "/objective"),
        ({"metrics": None}, "/metrics"),
        ({"problem": {}}, "/problem/pp_degree"),
    ],
)
def test_altered_documents_are_refused(plan: Plan, change: dict[str, Any], pointer: str) -> None:
    document = json.loads(json.dumps(plan_json(plan))) | change
    with pytest.raises(InvalidInput) as caught:
        parse_plan(document)
    assert caught.value.issues[0].pointer == pointer


@pytest.mark.parametrize(
    ("value", "bound", "gap"),
    [(11, 10, 0.1), (10, 10, 0), (10 * (1 + 1e-12), 10, 0), (0, 0, 0), (1, 0, float("inf"))],
)
def test_gap(value: float, bound: float, gap: float) -> None:
    assert gap_of(value, bound) == pytest.approx(gap)


QUICK = SearchOptions("quick")


@pytest.mark.parametrize(
    ("objective", "bound", "expected"),
    [
        (10.0, 0.0, "feasible"),
        (10.0, 9.9, "feasible"),
        (10.0, 10.0, "optimal"),
        (10.0, 10.0 * (1 + 5e-10), "optimal"),
        (10.0, 10.0 * (1 - 5e-10), "optimal"),
        (10.0, 10.0 * (1 + 2e-9), "contradicted"),
        (1e-90, 2e-90, "contradicted"),
        (0.0, 0.0, "optimal"),
        (0.0, 1e-90, "contradicted"),
    ],
)
def test_a_plan_may_undercut_a_bound_only_by_rounding(objective: float, bound: float, expected: str) -> None:
    assert verdict(objective, bound) == expected
    if expected == "contradicted":
        with pytest.raises(ContradictedBound):
            certify(uniform(1, 1), objective, bound, "test")
        return
    certificate = certify(uniform(1, 1), objective, bound, "test")
    assert certificate.status == expected
    assert certificate.lower_bound == (objective if expected == "optimal" else bound)
    assert certificate.gap == gap_of(objective, bound)


def test_a_wrong_bound_from_the_caller_is_contradicted() -> None:
    problem = uniform(2, 3)
    orders = serial(problem).orders
    with pytest.raises(ContradictedBound) as caught:
        make_plan(problem, orders, method="x", lower_bound=1e9, source="a guess")
    assert parse_problem(caught.value.problem) == problem
    assert caught.value.bound == 1e9
    assert caught.value.source == "a guess"
    assert caught.value.objective < 1e9


def too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full bound is far above what any order reaches."""
    true = Bound(1.0, "quick")
    monkeypatch.setattr(
        "zbv_solver.search.run.lower_bound",
        lambda problem, effort="full", *_rest: true if effort == "quick" else Bound(1e6, "wrong"),
    )


def test_a_search_with_a_wrong_bound_returns_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    too_high(monkeypatch)
    heard: list[Progress] = []
    problem = uniform(2, 4)
    with pytest.raises(ContradictedBound) as caught:
        search(problem, QUICK, heard.append)
    assert caught.value.problem == problem_json(problem)
    assert caught.value.source == "bounds"
    assert heard, "what was found before the wrong bound is reported"
    assert all(progress.lower_bound <= progress.objective for progress in heard)
    assert all(progress.gap > 0 for progress in heard), "and nothing is reported as optimal after it"


def test_a_wrong_bound_from_cp_sat_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = Grid.proven
    monkeypatch.setattr(Grid, "proven", lambda grid, parts: 3 * proven(grid, parts))
    weak = Bound(1.0, "weak")  # so that CP-SAT is asked
    monkeypatch.setattr("zbv_solver.search.run.lower_bound", lambda *_, **__: weak)
    problem = uniform(2, 2, objective="makespan")
    with pytest.raises(ContradictedBound) as caught:
        search(problem, SearchOptions(without=("tune", "anneal", "windows")))
    assert caught.value.source == "cp-sat"


def test_the_bound_of_cp_sat_is_returned_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform(2, 2, objective="makespan")
    start = serial(problem).orders
    right = refine(problem, start, lower_bound=0.0, effort=1.0)
    proven = Grid.proven
    monkeypatch.setattr(Grid, "proven", lambda grid, parts: 3 * proven(grid, parts))
    wrong = refine(problem, start, lower_bound=0.0, effort=1.0)
    assert wrong.lower_bound > right.lower_bound


def test_a_wrong_bound_over_all_cuts_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.search.layered.least_worst_load", lambda problem, tables: 1e6)
    heard: list[Progress] = []
    with pytest.raises(ContradictedBound) as caught:
        search(layered(), QUICK, heard.append)
    assert caught.value.source == "cuts"
    assert "layers" in caught.value.problem
    assert heard == []


def answered(wrong_at: int) -> Callable[[Any], Plan]:
    """A search that claims a far too high bound for one of its problems."""
    asked: list[object] = []

    def ask(question: Problem | LayeredProblem) -> Plan:
        plan = search(question, QUICK)
        asked.append(question)
        if len(asked) - 1 != wrong_at:
            return plan
        if plan.cut is not None:
            return replace(plan, cut=replace(plan.cut, lower_bound=1e6))
        return replace(plan, metrics=replace(plan.metrics, lower_bound=1e6))

    return ask


def test_a_wrong_bound_at_a_larger_limit_contradicts_plans_at_smaller_limits() -> None:
    with pytest.raises(ContradictedBound, match="larger limit"):
        frontier_points(uniform(2, 3), answered(3))
    with pytest.raises(ContradictedBound, match="larger limit"):
        frontier_points(layered(microbatches=4), answered(2))


@pytest.mark.parametrize("command", ["plan", "compare", "frontier"])
def test_after_a_contradicted_bound_commands_save_the_problem_and_exit_with_70(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_high(monkeypatch)
    monkeypatch.chdir(tmp_path)
    given = Path("given.json")
    given.write_text(json.dumps(uniform_document(2, 4)))
    assert main([command, str(given), "--effort", "quick"]) == 70
    message = capsys.readouterr().err
    (kept,) = tmp_path.glob("zbv-contradiction-*.json")
    assert f"The problem is in {kept.name}." in message
    assert "Traceback" not in message
    assert parse_problem(json.loads(kept.read_text())).microbatches == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.json", kept.name]


def test_the_command_reports_if_the_problem_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_high(monkeypatch)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    given = tmp_path / "given.json"
    given.write_text(json.dumps(uniform_document(2, 4)))
    gone.rmdir()
    assert main(["plan", str(given), "--effort", "quick"]) == 70
    assert "could not be written" in capsys.readouterr().err
