"""Plans: identity, documents, refused documents, and bounds that a plan contradicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cut_models import cut_problem
from support.cuts import layered
from support.orders import random_orders
from support.problems import differing_problems, problems, uniform, uniform_document
from zbv_solver.bounds import Bound
from zbv_solver.commands.cli import main
from zbv_solver.errors import ContradictedBound, InvalidInput
from zbv_solver.frontiers.frontier import frontier_points
from zbv_solver.improve.cp_sat import Grid
from zbv_solver.plans.plan import (
    Baseline,
    CutCertificate,
    Metrics,
    Plan,
    Provenance,
    SimulatedBaseline,
    Simulation,
    Spans,
    certify,
    gap_of,
    plan_json,
    verdict,
)
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.jitter import Jitter
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.search.incumbent import Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

QUICK = SearchOptions("quick")


def altered(plan: Plan, **changes: Any) -> dict[str, Any]:
    """The document of a plan, as a reader gets it, with changed keys; ``...`` removes one."""
    document: dict[str, Any] = json.loads(json.dumps(plan_json(plan))) | changes
    return {key: value for key, value in document.items() if value is not ...}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with every part that a plan may have, whose stated numbers need not be true."""
    cut = cut_problem(["a", "b", "c"], [1, 1, 0, 1], [False, True, False, True])
    problem = draw(st.one_of(problems(kinds=("v", "loop", "single")), differing_problems(), st.just(cut)))
    number, names, flags = st.floats(-1e9, 1e9), st.text(max_size=9), st.booleans()
    per_rank = st.lists(number, max_size=3).map(tuple)
    sizes: Any = st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple)
    recompute: Any = st.none() | st.lists(flags, max_size=3).map(tuple)
    spans = st.builds(Spans, number, number, number, number)
    simulated = st.lists(st.builds(SimulatedBaseline, names, spans, flags), max_size=2).map(tuple)
    jitter = st.sampled_from([Jitter(), Jitter.of(0.1, 0.2, 0.3)])
    simulation = st.builds(Simulation, jitter, st.integers(1, 99), st.integers(), spans, simulated)
    baseline = st.builds(Baseline, names, number, number, number, per_rank, flags, sizes, recompute)
    status = st.sampled_from(["optimal", "feasible"])
    extra = st.dictionaries(st.sampled_from(["effort", "x"]), names | number)
    seconds = st.integers(0, 10**9).map(lambda millionths: millionths / 1e6)
    return Plan(
        problem,
        random_orders(problem, Random(draw(st.integers(0, 99)))),
        draw(st.builds(Metrics, number, number, number, per_rank, number, number, status)),
        draw(st.lists(baseline, max_size=2).map(tuple)),
        draw(st.builds(Provenance, names, st.integers(), seconds, names, extra)),
        draw(st.builds(CutCertificate, names, number, number)) if problem.model else None,
        draw(st.none() | simulation),
    )


@given(plans())
@settings(max_examples=60)
def test_plans_round_trip_as_documents_and_keep_their_identity(plan: Plan) -> None:
    document = altered(plan)
    again = parse_plan(document)
    assert again == plan
    assert plan_json(again) == document
    hashed = {"problem": document["problem"], "ranks": document["ranks"]}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    assert plan.plan_id == document["plan_id"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(uniform(2, 4, limit=4), QUICK)


def test_unknown_keys_are_ignored_and_absent_ones_have_defaults(plan: Plan) -> None:
    metrics = {"makespan": 20, "span": 15, "bubble_rate": 0.5, "peak_memory": [4, 4], "lower_bound": 10}
    document = altered(plan, metrics=metrics | {"new": 1}, new=2, plan_id=..., objective=..., baselines=...)
    read = parse_plan({**document, "provenance": {}})
    assert (read.problem, read.orders, read.baselines) == (plan.problem, plan.orders, ())
    assert read.metrics == Metrics(20, 15, 0.5, (4, 4), 10, 0.5, "feasible")
    assert read.origin == "this plan"


BASELINE = {"name": "1f1b", "span": 1, "makespan": 1, "bubble_rate": 0, "peak_memory": [1, 1], "fits": True}


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"ranks": [["0F0"]]}, "/ranks"),
        ({"ranks": "0F0"}, "/ranks"),
        ({"ranks": [["0F0"], [7]]}, "/ranks/1/0"),
        ({"ranks": [["0F0"], ["zz"]]}, "/ranks/1/0"),
        ({"ranks": [["0F0"], ["1F0"]]}, "/plan_id"),
        ({"ranks": [["0F0"] * 97, []]}, "/ranks"),
        ({"plan_id": "0" * 64}, "/plan_id"),
        ({"objective": "makespan"}, "/objective"),
        ({"partition": [["a"], ["b"], ["c"], ["d"]]}, "/partition"),
        ({"recompute": [False] * 4}, "/recompute"),
        ({"metrics": None}, "/metrics"),
        ({"metrics": {"span": float("nan")}}, "/metrics/makespan"),
        ({"baselines": [{**BASELINE, "peak_memory": [1, float("inf")]}]}, "/baselines/0/peak_memory/1"),
        ({"baselines": [BASELINE] * 101}, "/baselines"),
        ({"provenance": {"seed": "x"}}, "/provenance/seed"),
        ({"cut": {"gap": "1"}}, "/cut/gap"),
        ({"simulation": {}}, "/simulation/expected_span"),
        ({"problem": {}}, "/problem/pp_degree"),
    ],
)
def test_altered_documents_are_refused(plan: Plan, change: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_plan(altered(plan, **change))
    assert caught.value.issues[0].pointer == pointer


# --- bounds


@pytest.mark.parametrize(
    ("objective", "bound", "expected", "gap"),
    [
        (10.0, 0.0, "feasible", float("inf")),
        (11.0, 10.0, "feasible", 0.1),
        (10.0, 10.0, "optimal", 0.0),
        (10.0, 10.0 * (1 + 5e-10), "optimal", 0.0),
        (10.0, 10.0 * (1 - 5e-10), "optimal", 0.0),
        (10.0, 10.0 * (1 + 2e-9), "contradicted", None),
        (1e-90, 2e-90, "contradicted", None),
        (0.0, 0.0, "optimal", 0.0),
        (0.0, 1e-90, "contradicted", None),
    ],
)
def test_a_plan_may_undercut_a_bound_only_by_rounding(
    objective: float, bound: float, expected: str, gap: float | None
) -> None:
    problem = uniform(1, 1)
    assert verdict(objective, bound) == expected
    if gap is not None:
        certificate = certify(problem, objective, bound, "test")
        assert certificate.status == expected
        assert certificate.lower_bound == (objective if expected == "optimal" else bound)
        assert certificate.gap == gap_of(objective, bound) == pytest.approx(gap)
        return
    with pytest.raises(ContradictedBound) as caught:
        certify(problem, objective, bound, "test")
    error = caught.value
    assert (error.objective, error.bound, error.source) == (objective, bound, "test")
    assert parse_problem(error.problem) == problem


def too_high(patch: pytest.MonkeyPatch) -> None:
    """The full bound is far above what any order reaches."""
    true, wrong = Bound(1.0, "quick"), Bound(1e6, "wrong")
    patch.setattr(
        "zbv_solver.search.run.lower_bound",
        lambda problem, effort="full", *_rest: true if effort == "quick" else wrong,
    )


def too_high_over_all_cuts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("zbv_solver.search.layered.least_worst_load", lambda problem, tables: 1e6)


def too_high_from_cp_sat(patch: pytest.MonkeyPatch) -> None:
    proven, weak = Grid.proven, Bound(1.0, "weak")  # so weak that CP-SAT is asked
    patch.setattr(Grid, "proven", lambda grid, parts: 3 * proven(grid, parts))
    patch.setattr("zbv_solver.search.run.lower_bound", lambda *_, **__: weak)


@pytest.mark.parametrize(
    ("spoil", "question", "options", "source"),
    [
        (too_high, uniform(2, 4), QUICK, "bounds"),
        (too_high_over_all_cuts, layered(), QUICK, "cuts"),
        (
            too_high_from_cp_sat,
            uniform(2, 2, objective="makespan"),
            SearchOptions(without=("tune", "anneal", "windows")),
            "cp-sat",
        ),
    ],
)
def test_a_search_with_a_wrong_bound_returns_no_plan(
    spoil: Callable[[pytest.MonkeyPatch], None],
    question: Problem | LayeredProblem,
    options: SearchOptions,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch)
    heard: list[Progress] = []
    with pytest.raises(ContradictedBound) as caught:
        search(question, options, heard.append)
    assert caught.value.source == source
    assert parse_any_problem(caught.value.problem) == question
    assert bool(heard) == (source != "cuts"), "what was found before the wrong bound is reported"
    assert all(progress.gap > 0 for progress in heard), "and nothing is reported as optimal after it"


@pytest.mark.parametrize(("question", "part"), [(uniform(2, 3), "metrics"), (layered(), "cut")])
def test_a_wrong_bound_at_a_larger_limit_contradicts_plans_at_smaller_limits(
    question: Problem | LayeredProblem, part: str
) -> None:
    number = count()

    def answer(problem: Problem | LayeredProblem) -> Plan:
        plan = search(problem, QUICK)
        wrong = {part: replace(getattr(plan, part), lower_bound=1e6)}
        return plan if next(number) != 2 else replace(plan, **wrong)

    with pytest.raises(ContradictedBound, match="larger limit"):
        frontier_points(question, answer)


@pytest.mark.parametrize("command", ["plan", "compare", "frontier"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_after_a_contradicted_bound_commands_save_the_problem_and_exit_with_70(
    command: str,
    is_gone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    too_high(monkeypatch)
    folder, problem = tmp_path / "folder", tmp_path / "given.json"
    folder.mkdir()
    monkeypatch.chdir(folder)
    problem.write_text(json.dumps(uniform_document(2, 4)))
    if is_gone:
        folder.rmdir()
    assert main([command, str(problem), "--effort", "quick"]) == 70
    message = capfd.readouterr().err
    assert "Traceback" not in message
    if is_gone:
        assert "could not be written" in message
        return
    (kept,) = folder.iterdir()
    assert kept.match("zbv-contradiction-*.json")
    assert f"The problem is in {kept.name}." in message
    assert parse_problem(json.loads(kept.read_text())).microbatches == 4
