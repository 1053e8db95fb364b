"""Plans from layers: cut, placement, order and what is recomputed are chosen together."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, every_cut, layered, layered_problems
from zbv_solver.bounds import lower_bound
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import CutSpace, CutTables, ScoredCut
from zbv_solver.partition.first_cuts import (
    even_cut,
    histogram_cut,
    level_cut,
    rooms,
    roomy_cuts,
    with_room,
)
from zbv_solver.partition.joint_search import Judge, improve_cut
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.incumbent import Progress
from zbv_solver.search.layered import first_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify

QUICK = SearchOptions(effort="quick", seed=1)
BLOCKS = 16


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(layered(placement="auto"), QUICK)


@pytest.fixture(scope="module")
def small() -> Plan:
    return search(layered(), QUICK)


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


@pytest.mark.parametrize("seconds", [None, 0.02, 0.3])
def test_a_search_that_ends_early_is_no_worse_than_its_baselines(seconds: float | None) -> None:
    problem = layered(placement="auto", microbatches=32, memory={"limit": 30})
    plan = search(problem, SearchOptions(time_limit=seconds), cancelled=lambda: seconds is None)
    verify(plan)
    assert plan.provenance.extra["cut"] == ("cancelled" if seconds is None else "time limit")
    if seconds is not None:
        assert all(row.span >= plan.objective * (1 - 1e-9) for row in plan.baselines if row.fits)


OTHERS: list[dict[str, Any]] = [
    {"layers": [EMBEDDING, {**BLOCK, "forward": 11}, HEAD]},
    {"pp_degree": 3},
    {"microbatches": 5},
    {"placement": "single"},
    {"memory": {"limit": 1000}},
    {"cut": {"first": 1}},
    {"objective": "makespan"},
]


def test_an_incumbent_must_be_a_plan_of_these_layers_and_is_verified_again(small: Plan) -> None:
    for changes in OTHERS:
        with pytest.raises(InvalidPlan):
            search(layered(**changes), QUICK, incumbent=small)
    with pytest.raises(InvalidPlan):
        search(layered(), QUICK, incumbent=replace(small, orders=Orders.of_rows([])))
    with pytest.raises(TypeError, match="the incumbent must be a Plan"):
        search(layered(), incumbent=small.orders)
    metrics = replace(small.metrics, span=small.metrics.span / 2, lower_bound=1.0, status="optimal")
    resumed = search(layered(), QUICK, cancelled=lambda: True, incumbent=replace(small, metrics=metrics))
    assert resumed.metrics.span == small.metrics.span
    assert search(small.problem, QUICK).problem == small.problem  # with its cut


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


def short_of_memory(limit: float | None, placement: str = "v") -> LayeredProblem:
    """A model of 16 blocks that hold 4 each, or 1 when recomputed, on four ranks."""
    layers = [EMBEDDING, {**BLOCK, "repeat": BLOCKS, "recompute": RECOMPUTE}, HEAD]
    return layered(pp_degree=4, microbatches=16, layers=layers, placement=placement, memory={"limit": limit})


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


@pytest.mark.parametrize("limit", [4, 5, 6])
def test_the_first_plan_of_layers_has_the_full_bound_of_its_stages(limit: float) -> None:
    layer = {"name": "block", "forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 8}
    layer["memory"] = {"forward": 1, "backward_weight": -1}
    plan = first_plan(layered(pp_degree=4, microbatches=12, layers=[layer], memory={"limit": limit}))
    full = lower_bound(plan.problem).value
    assert lower_bound(plan.problem, "quick").value < full
    assert plan.metrics.lower_bound == pytest.approx(full)


@pytest.mark.parametrize("limit", [5, 7, None])
def test_what_is_useless_changes_no_first_plan_that_is_of_use(limit: float | None) -> None:
    block = {"name": "block", "forward": 1, "backward_input": 1.2, "backward_weight": 0.8, "repeat": 9}
    block["memory"] = {"forward": 1, "backward_weight": -1}
    head = {"name": "head", "forward": 2.7, "backward_input": 2.7, "backward_weight": 2.7}
    asked = {"pp_degree": 4, "microbatches": 12, "placement": "auto", "memory": {"limit": limit}}
    problem = layered(layers=[block, head], **asked)
    plan = first_plan(problem)
    assert first_plan(problem, useless=plan.objective * 1.001).plan_id == plan.plan_id
    useless = first_plan(problem, useless=plan.objective * 0.5)
    verify(useless)
    assert useless.objective > plan.objective, "no other cut was tried"


def test_room_is_made_for_activations_and_not_for_parameters() -> None:
    space = space_of(short_of_memory(32))
    twice, bounds = with_room(space, np.full((2, space.tables.n), 2.0)), level_cut(space)
    for rank, stages in enumerate(space.placement.stages_of):
        blocks = sum(min(bounds[stage + 1], BLOCKS + 1) - max(bounds[stage], 1) for stage in stages)
        for times, roomy in ((1, space), (2, twice)):
            assert roomy.needs(bounds, rank, (False,) * len(stages)) == blocks * (times * 4 + 1)
    kept = (True, False) * 4
    fitting = space.fitting(bounds, kept)
    assert fitting is not None
    assert all(again >= keep for again, keep in zip(fitting.recompute, kept, strict=True))


def test_a_plan_states_the_layers_of_every_stage_and_is_read_back_unchanged(plan: Plan) -> None:
    written = plan_json(plan)
    names = [name for stage in written["partition"] for name in stage]
    assert names == ["embedding", *(f"block.{k}" for k in range(8)), "head"]
    assert written["problem"]["partition"] == written["partition"]
    assert len(written["partition"]) == plan.problem.n_stages
    assert 0 <= written["cut"]["lower_bound"] <= plan.metrics.lower_bound
    read = parse_plan(json.loads(json.dumps(written)))
    assert (read.plan_id, read.problem, read.cut) == (plan.plan_id, plan.problem, plan.cut)
    with pytest.raises(InvalidInput, match="differs from the problem's"):
        parse_plan(written | {"partition": [*written["partition"][:-1], []]})


@pytest.mark.parametrize("placement", ["v", "loop", "single", "auto"])
def test_a_placement_can_be_forced_and_one_rank_has_all_layers(placement: str) -> None:
    kinds = {search(layered(placement=placement), QUICK).problem.placement.kind, placement}
    assert len(kinds - {"auto"}) == 1
    one = search(layered(pp_degree=1, placement=placement, memory={"limit": 70}), QUICK)
    assert one.metrics.status == "optimal"
    assert len(plan_json(one)["partition"]) == one.problem.n_stages
    with pytest.raises(InfeasibleMemory) as caught:
        search(layered(placement=placement, memory={"limit": 10}), QUICK)
    least = caught.value.smallest
    assert max(least) > 10
    search(layered(placement=placement, memory={"limit": list(least)}), QUICK)


def test_progress_only_improves_and_carries_its_own_problem() -> None:
    """The first plan is reported before cuts are estimated."""
    reports: list[Progress] = []
    plan = search(layered(microbatches=8), QUICK, reports.append)
    values = [progress.objective for progress in reports]
    assert values == sorted(values, reverse=True)
    assert plan.objective <= values[-1] * (1 + 1e-9)
    for progress in reports:
        assert progress.lower_bound <= progress.objective
        assert progress.problem.model is not None
    reports.clear()
    search(layered(placement="auto", microbatches=8), QUICK, reports.append, lambda: bool(reports))
    assert len(reports) == 1


def test_a_plan_is_no_worse_than_one_of_a_simple_cut_and_states_the_bound_over_all_cuts() -> None:
    problem = layered(microbatches=8, memory={"limit": 24})
    plan, space = search(problem, QUICK), space_of(problem)
    for bounds in (even_cut(space), histogram_cut(space)):
        cut = space.fitting(bounds)
        if cut is not None:
            simple = search(problem.cut_into(space.placement, cut), QUICK)
            assert plan.objective <= simple.objective * (1 + 1e-9)
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    assert plan.cut is not None
    assert plan.cut.lower_bound == pytest.approx(8 * balanced.value)
    assert plan.objective > plan.cut.lower_bound
    assert plan.cut.gap == pytest.approx(plan.objective / plan.cut.lower_bound - 1)


@pytest.mark.parametrize("limit", [24, 40, 200])
def test_memory_decides_what_is_recomputed(limit: float) -> None:
    """As much as pays: no worse than all stages or none, and more than what is needed to be possible."""
    problem = short_of_memory(limit)
    plan, space = search(problem, QUICK), space_of(problem)
    assert plan.problem.model is not None
    recompute = plan.problem.model.cut.recompute
    assert plan_json(plan)["recompute"] == list(recompute)
    assert max(plan.metrics.peak_memory) <= limit
    balanced = balanced_cut(space_of(replace(problem, limit=None)), level_cut(space))
    assert balanced is not None
    for again in (False, True):
        cut = problem.cut_into(space.placement, replace(balanced.cut, recompute=(again,) * 8))
        with suppress(InfeasibleMemory):
            assert plan.objective <= search(cut, QUICK).objective * (1 + 1e-9)
    assert any(recompute) == (limit < 200)
    least = balanced_cut(space, level_cut(space))
    assert least is not None
    assert sum(recompute) >= sum(least.cut.recompute)
    if limit == 24:
        assert plan.objective < 0.9 * search(problem.cut_into(space.placement, least.cut), QUICK).objective


@settings(max_examples=40)
@given(layered_problems(placements=("v", "single", "loop"), memory={"limit": 12}))
def test_cuts_with_room_to_spare_fit_and_keep_the_rules(problem: LayeredProblem) -> None:
    """What is known of less room saves work and changes no load."""
    space = space_of(problem)
    loads = []
    for cut in roomy_cuts(space, level_cut(space)):
        assert space.allows(space.bounds_of(cut))
        assert space.excess(cut) <= 0
        loads.append(space.worst_load(cut))
    if space.placement.kind != "loop":  # a loop has no exact cut for given room
        alone = [balanced_cut(with_room(space, times), level_cut(space)) for times in rooms(space)]
        assert loads == pytest.approx([scored.value for scored in alone if scored is not None])


def test_the_climb_gets_better_and_keeps_the_limit() -> None:
    space = space_of(short_of_memory(40))
    bounds = level_cut(space)
    for cut in (space.fitting(bounds), space.cut(bounds, (True,) * 8)):
        assert cut is not None
        judge = Judge(space)
        start = ScoredCut(cut, judge.value(cut))
        climbed = improve_cut(judge, start, 300_000, 1, lambda: False)
        assert climbed.value < start.value
        assert space.excess(climbed.cut) <= 0


def test_a_judge_sees_that_a_tight_limit_slows_every_microbatch() -> None:
    """16 microbatches are judged by 8 and 4; the most loaded rank's work alone would promise half of it."""
    problem = short_of_memory(32)
    space = space_of(problem)
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    real = search(problem.cut_into(space.placement, balanced.cut), QUICK).objective
    assert Judge(space).value(balanced.cut) == pytest.approx(real, rel=0.15)
    assert Judge(space).floor(balanced.cut) < 0.7 * real
