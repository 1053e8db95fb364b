"""Plans from layers: cut, placement and order chosen together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, document, every_cut, layered
from zbv_solver.bounds import lower_bound
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import CutSpace, CutTables, ScoredCut
from zbv_solver.partition.first_cuts import even_cut, histogram_cut, level_cut
from zbv_solver.partition.joint_search import Judge, improve_cut
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.incumbent import Progress
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

QUICK = SearchOptions("quick")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(layered(placement="auto"), QUICK)


@pytest.fixture(scope="module")
def small() -> Plan:
    return search(layered(), QUICK)


def test_published_times_of_layers_can_be_planned() -> None:
    """Llama 2 7B as Galvatron measured it: 4.396 ms for F of a block, which keeps 514.6 MiB."""
    block = {
        **{"name": "block", "repeat": 32, "forward": 4.396, "backward_input": 5.0, "backward_weight": 3.8},
        "memory": {"forward": 514.6, "backward_input": 0, "backward_weight": -514.6, "static": 3104},
    }
    problem = parse_any_problem(
        {
            **{"pp_degree": 4, "microbatches": 16, "placement": "auto"},
            "layers": [
                {"name": "embedding", "forward": 0.2, "backward_input": 0, "backward_weight": 1.3},
                block,
                {"name": "head", "forward": 6.09, "backward_input": 6.0, "backward_weight": 4.0},
            ],
            "memory": {"limit": 80000},
            "units": {"time": "ms", "memory": "MiB"},
        }
    )
    found = search(problem, QUICK)
    verify(found)
    # The rank with both ends has room for 7 blocks within the time of 9, so another rank has 9.
    assert found.metrics.span == pytest.approx(16 * 9 * (4.396 + 5.0 + 3.8))
    assert found.cut is not None
    assert found.cut.lower_bound == pytest.approx(found.metrics.span)
    assert max(found.metrics.peak_memory) <= 80000


@pytest.mark.parametrize("placement", ["v", "single"])
@pytest.mark.parametrize("limit", [None, 12])
def test_the_smallest_cases_agree_with_brute_force_over_all_cuts(placement: str, limit: int | None) -> None:
    layers = [EMBEDDING, {**BLOCK, "repeat": 3, "recompute": RECOMPUTE}, HEAD]
    problem = layered(layers=layers, microbatches=2, placement=placement, memory={"limit": limit})
    options = SearchOptions(without=("tune", "windows"))
    found = search(problem, options)
    assert found.cut is not None
    assert found.cut.lower_bound <= found.objective
    for cut in every_cut(problem, problem.placements[0]):
        if lower_bound(cut).value < found.objective * (1 - 1e-9):
            best = search(cut, options)
            assert best.metrics.status == "optimal"
            assert best.objective >= found.objective * (1 - 1e-9)


def test_a_plan_states_the_layers_of_every_stage(plan: Plan) -> None:
    written = plan_json(plan)
    names = [name for stage in written["partition"] for name in stage]
    assert names == ["embedding", *(f"block.{k}" for k in range(8)), "head"]
    assert written["problem"]["partition"] == written["partition"]
    assert len(written["partition"]) == plan.problem.n_stages
    assert set(written["cut"]) == {"method", "lower_bound", "gap"}
    assert 0 <= written["cut"]["lower_bound"] <= plan.metrics.lower_bound


def test_a_written_plan_is_read_back_unchanged(plan: Plan) -> None:
    read = parse_plan(json.loads(json.dumps(plan_json(plan))))
    assert read.plan_id == plan.plan_id
    assert read.problem == plan.problem
    assert read.cut == plan.cut
    verify(read)


def test_a_plan_whose_partition_was_altered_is_refused(plan: Plan) -> None:
    altered = plan_json(plan)
    altered["partition"] = [*altered["partition"][:-1], []]
    with pytest.raises(InvalidInput, match="differs from the problem's"):
        parse_plan(altered)


def test_baselines_include_the_other_placements_and_the_simple_cuts(plan: Plan) -> None:
    baselines = {baseline.name: baseline for baseline in plan.baselines}
    kinds = {"v", "loop-2", "loop-3", "loop-4", "single"} & set(baselines)
    assert {"even-cut", "histogram-cut", "1f1b", "interleaved-1f1b"} <= set(baselines)
    assert len(kinds) == 4
    for name in ("even-cut", "histogram-cut", *kinds):
        assert baselines[name].span >= plan.objective * (1 - 1e-9)


def test_a_placement_without_a_cut_that_fits_is_left_out() -> None:
    """One layer a stage: of a loop, rank 0 would have both heavy ones."""
    layers = [
        {**EMBEDDING, "name": f"layer{number}", "memory": {"static": held}}
        for number, held in enumerate((10, 0, 10, 0))
    ]
    found = search(layered(placement="auto", layers=layers, memory={"limit": 10}), QUICK)
    names = {found.problem.placement.kind, *(baseline.name for baseline in found.baselines)}
    assert {"v", "single"} <= names
    assert "loop-2" not in names


@pytest.mark.parametrize("placement", ["v", "loop", "single"])
def test_a_placement_can_be_forced(placement: str) -> None:
    found = search(layered(placement=placement), QUICK)
    assert found.problem.placement.kind == placement


def test_a_plan_is_never_worse_than_the_same_search_on_a_simple_cut() -> None:
    problem = layered(microbatches=8)
    found = search(problem, QUICK).objective
    space = CutSpace(problem, problem.placements[0], CutTables.of(problem))
    for bounds in (even_cut(space), histogram_cut(space)):
        cut = problem.cut_into(space.placement, space.cut(bounds, (False,) * space.n_stages))
        assert found <= search(cut, QUICK).objective * (1 + 1e-9)


def test_the_certificate_states_the_bound_over_all_cuts() -> None:
    problem = layered(microbatches=8, memory={"limit": 24})
    space = CutSpace(problem, problem.placements[0], CutTables.of(problem))
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    found = search(problem, QUICK)
    assert found.cut is not None
    assert found.cut.lower_bound == pytest.approx(8 * balanced.value)
    assert found.objective > found.cut.lower_bound
    assert found.cut.gap == pytest.approx(found.objective / found.cut.lower_bound - 1)


def test_a_wrong_estimate_of_cuts_does_not_change_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    def worst_first(judge: Judge, cut: Cut) -> float:
        return -judge.floor(cut)

    problem = layered(microbatches=8)
    right = search(problem, QUICK).objective
    monkeypatch.setattr(Judge, "value", worst_first)
    assert search(problem, QUICK).objective == pytest.approx(right)


def test_the_same_problem_gets_the_same_plan(plan: Plan) -> None:
    assert search(layered(placement="auto"), QUICK).plan_id == plan.plan_id


def test_progress_only_improves_and_carries_its_own_problem() -> None:
    heard: list[Progress] = []
    found = search(layered(microbatches=8), QUICK, heard.append)
    values = [progress.objective for progress in heard]
    assert values == sorted(values, reverse=True)
    assert found.objective <= values[-1] * (1 + 1e-9)
    assert all(progress.lower_bound <= progress.objective for progress in heard)
    assert all(progress.problem.model is not None for progress in heard)


def test_a_cancelled_search_returns_the_best_so_far() -> None:
    found = search(layered(microbatches=16, memory={"limit": 30}), cancelled=lambda: True)
    verify(found)
    assert found.provenance.extra["cut"] == "cancelled"


def test_the_first_plan_is_reported_before_cuts_are_estimated() -> None:
    heard: list[Progress] = []
    search(layered(placement="auto", microbatches=8), QUICK, heard.append, lambda: bool(heard))
    assert len(heard) == 1


@pytest.mark.parametrize("seconds", [0.02, 0.3])
def test_no_baseline_that_fits_is_better_under_any_time_limit(seconds: float) -> None:
    problem = layered(placement="auto", microbatches=32, memory={"limit": 30})
    found = search(problem, SearchOptions(time_limit=seconds))
    verify(found)
    assert all(row.span >= found.objective * (1 - 1e-9) for row in found.baselines if row.fits)


def test_a_search_starts_from_its_incumbent(plan: Plan) -> None:
    resumed = search(layered(placement="auto"), SearchOptions(), cancelled=lambda: True, incumbent=plan)
    assert resumed.objective <= plan.objective * (1 + 1e-9)
    with pytest.raises(TypeError, match="the incumbent must be a Plan"):
        search(layered(), incumbent=plan.orders)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": [EMBEDDING, {**BLOCK, "forward": 11}, HEAD]},
        {"pp_degree": 3},
        {"microbatches": 5},
        {"placement": "single"},
        {"memory": {"limit": 1000}},
        {"cut": {"first": 1}},
        {"objective": "makespan"},
    ],
)
def test_a_plan_of_another_layered_problem_is_refused_as_incumbent(
    small: Plan, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidPlan):
        search(layered(**changes), QUICK, incumbent=small)


def test_the_metrics_of_an_incumbent_are_recomputed(small: Plan) -> None:
    metrics = replace(small.metrics, span=small.metrics.span / 2, lower_bound=1.0, status="optimal")
    resumed = search(layered(), QUICK, cancelled=lambda: True, incumbent=replace(small, metrics=metrics))
    assert resumed.metrics.span == small.metrics.span
    verify(resumed)
    with pytest.raises(InvalidPlan):
        search(layered(), QUICK, incumbent=replace(small, orders=Orders.of_rows([])))


def test_memory_decides_what_is_recomputed() -> None:
    layers = [EMBEDDING, {**BLOCK, "recompute": RECOMPUTE}, HEAD]
    free = search(layered(layers=layers), QUICK)
    assert free.problem.model is not None
    assert not any(free.problem.model.cut.recompute)
    tight = search(layered(layers=layers, memory={"limit": 17}), QUICK)
    assert tight.problem.model is not None
    assert any(tight.problem.model.cut.recompute)
    assert max(tight.metrics.peak_memory) <= 17
    assert plan_json(tight)["recompute"] == list(tight.problem.model.cut.recompute)
    assert tight.objective > free.objective


@pytest.mark.parametrize("placement", ["v", "loop", "single", "auto"])
def test_an_infeasible_limit_is_reported_with_a_feasible_one(placement: str) -> None:
    with pytest.raises(InfeasibleMemory) as caught:
        search(layered(placement=placement, memory={"limit": 10}), QUICK)
    least = caught.value.smallest
    assert max(least) > 10
    search(layered(placement=placement, memory={"limit": list(least)}), QUICK)


@pytest.mark.parametrize("placement", ["auto", "v", "single", "loop"])
def test_one_rank_has_all_layers(placement: str) -> None:
    found = search(layered(pp_degree=1, placement=placement, memory={"limit": 70}), QUICK)
    assert found.metrics.status == "optimal"
    assert len(plan_json(found)["partition"]) == found.problem.n_stages


def test_a_single_stage_has_no_neighbours() -> None:
    problem = layered(pp_degree=1, placement="single")
    judge = Judge(CutSpace(problem, problem.placements[0], CutTables.of(problem)))
    start = ScoredCut(Cut.at((0, 10)), 1e9)
    assert improve_cut(judge, start, 10_000, 0, lambda: False) == start


def test_a_given_partition_is_kept(small: Plan) -> None:
    written = plan_json(search(small.problem, QUICK))
    assert small.problem.model is not None
    assert written["partition"] == [list(names) for names in small.problem.model.partition]


def test_baselines_hold_the_static_memory_of_their_layers() -> None:
    """1F1B's last rank has the last stage of the model; in a V, the first rank has it."""
    heavy = {**HEAD, "memory": {"static": 100}}
    problem = layered(layers=[EMBEDDING, BLOCK, heavy])
    cut = problem.cut_into(problem.placements[0], Cut.at((0, 3, 5, 8, 10)))
    found = {baseline.name: baseline for baseline in search(cut, QUICK).baselines}
    assert list(cut.memory.static) == [103, 5]
    for name, rank in (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 1), ("zb-v", 0), ("v-min", 0)):
        peaks = found[name].peak_memory
        assert peaks[rank] > 100 > peaks[1 - rank]


def test_checking_a_plan_against_its_layers(plan: Plan) -> None:
    problem = layered(placement="auto")
    assert problem.as_cut_in(plan.problem) == plan.problem
    other = layered(placement="auto", layers=[EMBEDDING, {**BLOCK, "forward": 3}, HEAD])
    with pytest.raises(InvalidInput, match="differ from the layers"):
        other.as_cut_in(plan.problem)
    kept = layered(placement="auto", cut={"together": [["embedding", "head"]], "allow_empty": True})
    with pytest.raises(InvalidInput, match="breaks a rule"):
        kept.as_cut_in(plan.problem)


def test_layers_are_refused_where_a_cut_problem_is_required() -> None:
    from zbv_solver.problem.reading import parse_problem

    with pytest.raises(InvalidInput, match="not cut into stages"):
        parse_problem(document())
