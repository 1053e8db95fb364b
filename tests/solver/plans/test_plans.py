"""Plans and orders: identity, documents, refusals, transfers, and bounds that a plan contradicts."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given, settings
from hypothesis import strategies as st
from support.changed import ABSENT, changed
from support.cut_models import cut_problem
from support.cuts import layered
from support.orders import random_orders
from support.problems import differing_problems, problems, uniform, uniform_document
from zbv_solver.bounds import Bound
from zbv_solver.commands.cli import main
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.documents.files import read_json
from zbv_solver.errors import InvalidPlan
from zbv_solver.frontiers.frontier import frontier_points
from zbv_solver.improve.cp_sat import Grid
from zbv_solver.plans.channels import Channel, Transfer, channels, channels_of
from zbv_solver.plans.orders import Action, Orders, first_in_first_out
from zbv_solver.plans.plan import CutCertificate, Provenance, SimulatedBaseline, Spans, certify, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.problem import LETTERS
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.claims import check_plan
from zbv_solver.search.layered import first_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify, verify_orders

QUICK = SearchOptions("quick")


def altered(plan: zbv.Plan, **changes: Any) -> dict[str, Any]:
    """The document of a plan, as a reader gets it, with changed keys."""
    return changed(json.loads(json.dumps(plan_json(plan))), changes)


TIMED = [each for name in ("copies", "pairs") for each in read_json(Path(__file__).with_name(f"{name}.json"))]
"""Orders with copies or pairs or both, their makespan, span and peak memory."""


@pytest.mark.parametrize("timed", TIMED)
def test_known_orders_take_their_known_times(timed: dict[str, Any]) -> None:
    problem, orders = parse_problem(timed["problem"]), Orders.from_text(timed["ranks"])
    assert parse_problem(problem_json(problem)) == problem
    plan = make_plan(problem, orders, method="known")
    for metric in ("makespan", "span", "peak_memory"):
        assert getattr(plan.metrics, metric) == pytest.approx(timed[metric])
    document = altered(plan)
    assert document["ranks"] == timed["ranks"]
    assert parse_plan(document).plan_id == plan.plan_id
    assert "/metrics/span" in {claim.pointer for claim in check_plan(document).verified}
    for factor in (0.999, 1.001):
        busy = (1 - plan.metrics.bubble_rate) / factor
        wrong = replace(plan.metrics, span=plan.metrics.span * factor, bubble_rate=1 - busy)
        with pytest.raises(InvalidPlan, match="span"):
            verify(replace(plan, metrics=wrong))


@st.composite
def plans(draw: st.DrawFn) -> zbv.Plan:
    """Plans with every part that a plan may have, whose stated numbers need not be true."""
    cut = cut_problem(["a", "b", "c"], [1, 1, 0, 1], [False, True, False, True])
    problem = draw(st.one_of(problems(kinds=("v", "loop", "single")), differing_problems(), st.just(cut)))
    number, names, flags = st.floats(-1e9, 1e9), st.text(max_size=9), st.booleans()
    per_rank, sizes, recompute = (
        st.lists(of, max_size=3).map(tuple) for of in (number, st.integers(0, 9), flags)
    )
    spans = st.builds(Spans, number, number, number, number)
    simulated = st.lists(st.builds(SimulatedBaseline, names, spans, flags), max_size=2).map(tuple)
    jitter = st.sampled_from([zbv.Jitter(), zbv.Jitter.of(0.1, 0.2, 0.3)])
    simulation = st.builds(zbv.Simulation, jitter, st.integers(1, 99), st.integers(), spans, simulated)
    baseline = st.builds(
        zbv.Baseline, names, number, number, number, per_rank, flags, st.none() | sizes, st.none() | recompute
    )
    status = st.sampled_from(["optimal", "feasible"])
    extra = st.dictionaries(st.sampled_from(["effort", "x"]), names | number)
    seconds = st.integers(0, 10**9).map(lambda millionths: millionths / 1e6)
    return zbv.Plan(
        problem,
        random_orders(problem, Random(draw(st.integers(0, 99)))),
        draw(st.builds(zbv.Metrics, number, number, number, per_rank, number, number, status)),
        draw(st.lists(baseline, max_size=2).map(tuple)),
        draw(st.builds(Provenance, names, st.integers(), seconds, names, extra)),
        draw(st.builds(CutCertificate, names, number, number)) if problem.model else None,
        draw(st.none() | simulation),
    )


@given(plans())
@settings(max_examples=30)
def test_plans_round_trip_as_documents_and_keep_their_identity(plan: zbv.Plan) -> None:
    document = altered(plan)
    again = parse_plan(document)
    assert again == plan
    assert plan_json(again) == document
    hashed = {"problem": document["problem"], "ranks": document["ranks"]}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    assert plan.plan_id == document["plan_id"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def plan() -> zbv.Plan:
    return search(uniform(2, 4, limit=4), QUICK)


def test_unknown_keys_are_ignored_and_absent_ones_have_defaults(plan: zbv.Plan) -> None:
    metrics = {"makespan": 20, "span": 15, "bubble_rate": 0.5, "peak_memory": [4, 4], "lower_bound": 10}
    document = altered(
        plan, metrics=metrics | {"new": 1}, new=2, plan_id=ABSENT, objective=ABSENT, baselines=ABSENT
    )
    read = parse_plan({**document, "provenance": {}})
    assert (read.problem, read.orders, read.baselines) == (plan.problem, plan.orders, ())
    assert read.metrics == zbv.Metrics(20, 15, 0.5, (4, 4), 10, 0.5, "feasible")
    assert read.origin == "this plan"


BASELINE = {"name": "1f1b", "span": 1, "makespan": 1, "bubble_rate": 0, "peak_memory": [1, 1], "fits": True}


@pytest.mark.parametrize(("change", "pointer"), [
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
])  # fmt: skip
def test_altered_documents_are_refused(plan: zbv.Plan, change: dict[str, Any], pointer: str) -> None:
    with pytest.raises(zbv.InvalidInput) as caught:
        parse_plan(altered(plan, **change))
    assert caught.value.issues[0].pointer == pointer


@pytest.mark.parametrize(("objective", "bound", "expected", "gap"), [
    *((10.0, 0.0, "feasible", float("inf")), (11.0, 10.0, "feasible", 0.1), (0.0, 0.0, "optimal", 0.0)),
    *((10.0, 10.0 * (1 + share), "optimal", 0.0) for share in (0, 5e-10, -5e-10)),
    *((*values, "contradicted", None) for values in ((10.0, 10.00000002), (1e-90, 2e-90), (0.0, 1e-90))),
])  # fmt: skip
def test_plans_may_undercut_bounds_a_bit(objective: float, bound: float, expected: str, gap: Any) -> None:
    if gap is None:
        with pytest.raises(zbv.ContradictedBound) as caught:
            certify(uniform(1, 1), objective, bound, "test")
        error = caught.value
        assert (error.objective, error.bound, error.source) == (objective, bound, "test")
        assert zbv.parse(error.problem) == uniform(1, 1)
        return
    made = certify(uniform(1, 1), objective, bound, "test")
    assert (made.status, made.lower_bound) == (expected, objective if expected == "optimal" else bound)
    assert made.gap == pytest.approx(gap)
    assert certify(uniform(1, 1), 10.0, 9 - 1e-12, "test").lower_bound == 9, "a sum of whole numbers is one"


def spoil(patch: pytest.MonkeyPatch, source: str) -> None:
    """A bound becomes far too high: the full one, that over all cuts, or that of CP-SAT."""
    quick, proven = Bound(1.0, "quick"), Grid.proven
    full = Bound(1e6, "wrong") if source == "bounds" else quick
    if source == "cuts":
        patch.setattr("zbv_solver.search.layered.least_worst_load", lambda *_: 1e6)
        return
    bounds = {"quick": quick, "full": full, "thorough": full}
    patch.setattr("zbv_solver.search.run.lower_bound", lambda _, effort="full", *_rest: bounds[effort])
    if source == "cp-sat":
        patch.setattr(Grid, "proven", lambda grid, parts: 3 * proven(grid, parts))


@pytest.mark.parametrize(
    ("source", "question"),
    [("bounds", uniform(2, 4)), ("cuts", layered()), ("cp-sat", uniform(2, 2, objective="makespan"))],
)
def test_searches_refuse_a_wrong_bound(source: str, question: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, source)
    reports: list[zbv.Progress] = []
    options = SearchOptions(without=("tune", "anneal", "windows")) if source == "cp-sat" else QUICK
    with pytest.raises(zbv.ContradictedBound) as caught:
        search(question, options, reports.append)
    assert caught.value.source == source
    assert zbv.parse(caught.value.problem) == question
    assert bool(reports) == (source != "cuts"), "what was found before the wrong bound is reported"
    assert all(progress.gap > 0 for progress in reports), "and nothing is reported as optimal after it"


@pytest.mark.parametrize(("question", "part"), [(uniform(2, 3), "metrics"), (layered(), "cut")])
def test_a_wrong_bound_at_a_larger_limit_contradicts_plans_at_smaller_ones(question: Any, part: str) -> None:
    number = count()

    def answer(problem: Any) -> zbv.Plan:
        plan = first_plan(problem) if part == "cut" else search(problem, QUICK)
        changes = {part: replace(getattr(plan, part), lower_bound=1e6)} if next(number) == 2 else {}
        return replace(plan, **changes)

    with pytest.raises(zbv.ContradictedBound, match="larger limit"):
        frontier_points(question, answer)


@pytest.mark.parametrize("command", ["plan", "compare", "frontier"])
def test_after_a_contradicted_bound_commands_save_the_problem_and_exit_with_70(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, "bounds")
    folder, problem = tmp_path / "folder", tmp_path / "given.json"
    folder.mkdir()
    monkeypatch.chdir(folder)
    problem.write_text(json.dumps(uniform_document(2, 4)))
    for says in ("The problem is in zbv-contradiction-", "could not be written"):
        assert main([command, str(problem), "--effort", "quick"]) == 70
        message = capfd.readouterr().err
        assert (says in message, "Traceback" in message) == (True, False)
        for kept in folder.glob("*"):
            assert kept.name in message
            assert zbv.parse(json.loads(kept.read_text())).microbatches == 4
        shutil.rmtree(folder, ignore_errors=True)


RIGHT = ["0F0", "12B7", "7I3", "999999999W999999999"]
WRONG = ["", "0F", "F0", "F", "0X0", "0F0xyz", " 0F0", "0F0 ", "0F0\n", "\n", "0F0\n1F0", "0F0F", "00F0"]
WRONG += ["0F01", "0f0", "-1F0", "٣F0", "1000000000F0", "0F1000000000"]


@pytest.mark.parametrize("text", [*WRONG, 7])
def test_malformed_actions_are_refused_alone_and_in_lists(text: Any) -> None:
    with pytest.raises(zbv.InvalidInput, match="an action is a stage") as alone:
        Action.parse(text)
    with pytest.raises(zbv.InvalidInput) as caught:
        Orders.from_text([RIGHT, [*RIGHT, text, text], [text]])
    assert caught.value.issues == alone.value.below("/ranks/1/4").issues


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 999), st.sampled_from(LETTERS), st.integers(0, 999_999_999))),
        min_size=1,
    )
)
def test_orders_round_trip_as_text_and_as_actions(ranks: list[list[tuple[int, str, int]]]) -> None:
    orders = Orders.from_actions(ranks)
    texts = [[f"{stage}{letter}{j}" for stage, letter, j in actions] for actions in ranks]
    assert orders.all_text() == texts
    assert [orders.text(rank, at_most=3) for rank in range(len(ranks))] == [each[:3] for each in texts]
    assert [orders.actions(rank) for rank in range(len(ranks))] == ranks
    assert [str(action) for action in orders.actions(0)] == orders.text(0) == texts[0]
    again = Orders.from_text(texts)
    assert again == orders
    assert len(again) == sum(map(len, ranks))
    kinds = [array.dtype.name for array in (again.stage, again.letter, again.microbatch)]
    assert kinds == ["int32", "int8", "int32"]


@given(differing_problems(max_p=3, max_m=6), st.integers(0, 2**32))
def test_relabelling_undoes_any_exchange_of_equal_microbatches(problem: zbv.Problem, seed: int) -> None:
    kind_of, chance = problem.arrays.kind_of, Random(seed)
    orders = random_orders(problem, chance)
    label = np.arange(problem.microbatches)
    for kind in range(problem.arrays.kinds):
        members = np.flatnonzero(kind_of == kind).tolist()
        label[members] = chance.sample(members, len(members))
    relabelled = first_in_first_out(orders.renamed(label), problem.n_stages, kind_of)
    assert relabelled == first_in_first_out(orders, problem.n_stages, kind_of)
    assert np.array_equal(kind_of[relabelled.microbatch], kind_of[orders.microbatch])
    assert evaluate(problem, relabelled).span <= evaluate(problem, orders).span * (1 + 1e-9)
    verify_orders(replace(problem, memory=replace(problem.memory, limit=None)), relabelled)


@given(problems(max_m=4), st.integers(0, 2**32))
def test_orders_with_ascending_microbatches_remain(problem: zbv.Problem, seed: int) -> None:
    orders = next(priority_schedules(problem)).orders
    label = np.array(Random(seed).sample(range(problem.microbatches), problem.microbatches))
    assert first_in_first_out(orders.renamed(label), problem.n_stages) == orders


@given(
    problems(max_p=5, max_m=4, kinds=("v", "loop", "single"), loop_chunks=(1, 2, 3)),
    st.randoms(use_true_random=True),
)
def test_every_crossing_is_transferred_once_as_its_sender_lists(problem: zbv.Problem, random: Random) -> None:
    """Whatever the receiver's list is. The orders are shuffled, because they need not be executable."""
    whole = random_orders(problem, random)
    ranks = [random.sample(actions, len(actions)) for actions in map(whole.actions, range(whole.pp_degree))]
    rank_of = problem.placement.rank_of
    expected: dict[tuple[int, int], list[Transfer]] = {}
    for sender, actions in enumerate(ranks):
        for stage, letter, j in actions:
            target = stage + 1 if letter == "F" else stage - 1
            if letter != "W" and 0 <= target < problem.n_stages and rank_of[target] != sender:
                transfer = Transfer("activation" if letter == "F" else "gradient", min(stage, target), j)
                expected.setdefault((sender, rank_of[target]), []).append(transfer)
    found = channels(problem, Orders.from_actions(ranks))
    assert found == tuple(Channel(*ends, tuple(made)) for ends, made in sorted(expected.items()))
    for rank in range(whole.pp_degree):
        ends = {(channel.sender, channel.receiver) for channel in channels_of(rank, found)}
        assert ends == {pair for pair in expected if rank in pair}


def test_transfers_are_texts_and_malformed_ones_are_refused() -> None:
    for text in ("", "A", "1:2", "A1", "A1:", "A:1", "A1:2:3", "A-1:2", "A1:x", "A²:1", "F1:2", "a1:2"):
        with pytest.raises(zbv.InvalidInput, match="as in 'A3:0'"):
            Transfer.parse(text)
    texts = {"A12:345": Transfer("activation", 12, 345), "G0:0": Transfer("gradient", 0, 0)}
    assert {good: Transfer.parse(good) for good in texts} == texts
    assert list(map(str, texts.values())) == list(texts)
