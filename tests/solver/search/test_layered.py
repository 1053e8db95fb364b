"""Plans from layers choose cut, placement, order and recomputation together; so do baselines."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given
from support import cuts
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, layered, space_of
from support.executor_layers import layer
from zbv_models.fixed_orders.best_cut import best_cut
from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.baselines import BASELINES, baseline, baseline_names, merge_stages
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import CutSpace
from zbv_solver.partition.first_cuts import even_cut, histogram_cut, level_cut, rooms, roomy_cuts, with_room
from zbv_solver.plans.plan import Baseline, Plan, plan_json
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem, uncut
from zbv_solver.search.assemble import classical, compare
from zbv_solver.search.claims import Claim, check_plan
from zbv_solver.search.layered import bound_over_all_cuts, first_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify

QUICK = SearchOptions(effort="quick", seed=1)
BLOCKS = 16


HELD = {"forward": 2, "backward_input": -1, "backward_weight": -1}
AGAIN = {"backward_input": 4, "memory": {"forward": 0.5, "backward_input": 0.5, "backward_weight": -1}}
HEAVY_HEAD: dict[str, Any] = {
    **{"pp_degree": 4, "microbatches": 8, "costs": {"p2p": 1}},
    "layers": [
        layer("embedding", 1, 0, 1, memory=HELD),
        layer("block", 2, 2, 1, repeat=14, memory=HELD, recompute=AGAIN),
        layer("head", 10, 10, 5, memory=HELD),
    ],
}
"""A head of five blocks, on one rank's share of which nothing else should lie."""
TWO_KINDS = [layer("embedding", 0), layer("dense", 10, repeat=4)]
TWO_KINDS += [layer("moe", 10.01, 10, 10, repeat=4), layer("head", 1)]
PROBLEMS = {
    # Two kinds of blocks that differ by 0.1 %.
    "two-kinds": layered(microbatches=16, layers=TWO_KINDS, costs={}),
    "heavy-head": layered(**HEAVY_HEAD),
    "ample": layered(**HEAVY_HEAD, memory={"limit": 200}),
    "tight": layered(**HEAVY_HEAD, memory={"limit": 20}),
    "auto": layered(placement="auto"),
    "small": layered(),
}


@cache
def plan_of(name: str) -> Any:
    return search(PROBLEMS[name], QUICK)


def rows_of(plan: Plan) -> dict[str, Baseline]:
    return {row.name: row for row in plan.baselines}


@pytest.mark.parametrize(("placement", "limit"), [*product(["v", "single"], [None, 12])])
def test_the_smallest_cases_agree_with_brute_force_over_all_cuts(placement: str, limit: int | None) -> None:
    layers = [EMBEDDING, {**BLOCK, "repeat": 3, "recompute": RECOMPUTE}, HEAD]
    problem = layered(layers=layers, microbatches=2, placement=placement, memory={"limit": limit})
    options = SearchOptions(without=("tune", "windows"))
    plan: Any = search(problem, options)
    assert plan.cut.lower_bound <= plan.objective
    for cut in cuts.every_cut(problem, problem.placements[0]):
        if lower_bound(cut).value < plan.objective * (1 - 1e-9):
            best = search(cut, options)
            assert best.metrics.status == "optimal"
            assert best.objective >= plan.objective * (1 - 1e-9)


def test_a_placement_without_a_cut_that_fits_is_left_out() -> None:
    """One layer a stage: of a loop, rank 0 would have both heavy ones."""
    layers = [layer(f"layer{at}", 1, 0, memory={"static": 10 * (at % 2 == 0)}) for at in range(4)]
    plan = search(layered(placement="auto", layers=layers, memory={"limit": 10}), QUICK)
    names = {plan.problem.placement.kind, *rows_of(plan)}
    assert {"v", "single", "loop-2"} & names == {"v", "single"}


def test_an_incumbent_must_be_a_plan_of_these_layers_and_is_verified_again() -> None:
    small = plan_of("small")
    others: Any = {"pp_degree": 3, "microbatches": 5, "memory": {"limit": 1000}, "placement": "single"}
    for key, value in (*others.items(), ("objective", "makespan")):
        with pytest.raises(zbv.InvalidPlan):
            search(layered(**{key: value}), QUICK, incumbent=small)
    with pytest.raises(zbv.InvalidPlan):
        search(layered(), QUICK, incumbent=replace(small, orders=zbv.Orders.of_rows([])))
    with pytest.raises(TypeError, match="the incumbent must be a Plan"):
        search(layered(), incumbent=small.orders)
    metrics = replace(small.metrics, span=small.metrics.span / 2, lower_bound=1.0, status="optimal")
    resumed = search(layered(), QUICK, cancelled=lambda: True, incumbent=replace(small, metrics=metrics))
    assert resumed.metrics.span == small.metrics.span
    assert search(small.problem, QUICK).problem == small.problem  # with its cut


@pytest.mark.parametrize("limit", [5, 7, None])
def test_what_is_useless_changes_no_first_plan_that_is_of_use(limit: float | None) -> None:
    """A first plan has the full bound of its stages."""
    block = layer("block", 1, 1.2, 0.8, repeat=9, memory={"forward": 1, "backward_weight": -1})
    asked = {"pp_degree": 4, "microbatches": 12, "placement": "auto", "memory": {"limit": limit}}
    problem = layered(layers=[block, layer("head", 2.7)], **asked)
    plan = first_plan(problem)
    assert plan.metrics.lower_bound == pytest.approx(lower_bound(plan.problem).value)
    assert first_plan(problem, useless=plan.objective * 1.001).plan_id == plan.plan_id
    useless = first_plan(problem, useless=plan.objective * 0.5)
    verify(useless)
    assert useless.objective > plan.objective, "no other cut was tried"


@pytest.mark.parametrize("placement", ["v", "loop", "single", "auto"])
def test_a_placement_can_be_forced_and_one_rank_has_all_layers(placement: str) -> None:
    kinds = {first_plan(layered(placement=placement)).problem.placement.kind, placement}
    assert len(kinds - {"auto"}) == 1
    one = search(layered(pp_degree=1, placement=placement, memory={"limit": 70}), QUICK)
    assert one.metrics.status == "optimal"
    assert len(plan_json(one)["partition"]) == one.problem.n_stages
    with pytest.raises(zbv.InfeasibleMemory) as caught:
        search(layered(placement=placement, memory={"limit": 10}), QUICK)
    least = caught.value.smallest
    assert max(least) > 10
    first_plan(layered(placement=placement, memory={"limit": list(least)}))


def test_progress_only_improves_carries_its_own_problem_and_begins_before_cuts_are_estimated() -> None:
    reports: list[zbv.Progress] = []
    plan = search(layered(microbatches=8), QUICK, reports.append)
    values = [progress.objective for progress in reports]
    assert [*values, plan.objective] == pytest.approx(sorted([*values, plan.objective], reverse=True))
    assert all(report.lower_bound <= report.objective and report.problem.model for report in reports)
    reports.clear()
    search(layered(placement="auto", microbatches=8), QUICK, reports.append, lambda: bool(reports))
    assert len(reports) == 1


def short_of_memory(limit: float | None) -> LayeredProblem:
    """A model of 16 blocks that hold 4 each, or 1 when recomputed, on four ranks."""
    layers = [EMBEDDING, {**BLOCK, "repeat": BLOCKS, "recompute": RECOMPUTE}, HEAD]
    return layered(pp_degree=4, microbatches=16, layers=layers, memory={"limit": limit})


def balanced(space: CutSpace, without_limit: bool = False) -> Any:
    problem = replace(space.problem, limit=None) if without_limit else space.problem
    return balanced_cut(space_of(problem), level_cut(space))


def test_room_is_made_for_activations_and_not_for_parameters() -> None:
    space = space_of(short_of_memory(32))
    twice, bounds = with_room(space, np.full((2, space.tables.n), 2.0)), level_cut(space)
    for rank, stages in enumerate(space.placement.stages_of):
        blocks = sum(min(bounds[stage + 1], BLOCKS + 1) - max(bounds[stage], 1) for stage in stages)
        for times, roomy in ((1, space), (2, twice)):
            assert roomy.needs(bounds, rank, (False,) * len(stages)) == blocks * (times * 4 + 1)
    fitting: Any = space.fitting(bounds, (True, False) * 4)
    assert fitting.recompute[::2] == (True,) * 4


def test_a_plan_is_no_worse_than_one_of_a_simple_cut_and_states_the_bound_over_all_cuts() -> None:
    problem = layered(microbatches=8, memory={"limit": 24})
    plan, space = search(problem, QUICK), space_of(problem)
    for cut in filter(None, (space.fitting(bounds) for bounds in (even_cut(space), histogram_cut(space)))):
        simple = search(problem.cut_into(space.placement, cut), QUICK)
        assert plan.objective <= simple.objective * (1 + 1e-9)
    assert plan.cut is not None
    assert plan.objective > plan.cut.lower_bound == pytest.approx(8 * balanced(space).value)
    assert plan.cut.gap == pytest.approx(plan.objective / plan.cut.lower_bound - 1)


@pytest.mark.parametrize("limit", [24, 200])
def test_memory_decides_what_is_recomputed(limit: float) -> None:
    """As much as pays: no worse than all stages or none, and more than what is needed to be possible."""
    problem = short_of_memory(limit)
    plan, space = search(problem, QUICK), space_of(problem)

    def objective(cut: Cut) -> float:
        return search(problem.cut_into(space.placement, cut), QUICK).objective

    recompute = plan_json(plan)["recompute"]
    assert max(plan.metrics.peak_memory) <= limit
    for again in (False, True):
        with suppress(zbv.InfeasibleMemory):
            cut = replace(balanced(space, without_limit=True).cut, recompute=(again,) * 8)
            assert plan.objective <= objective(cut) * (1 + 1e-9)
    assert any(recompute) == (limit < 200)
    least = balanced(space).cut
    assert sum(recompute) >= sum(least.recompute)
    assert limit != 24 or plan.objective < 0.9 * objective(least)


@given(cuts.layered_problems(placements=("v", "single", "loop"), memory={"limit": 12}))
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


def test_baselines_include_the_other_placements_and_the_simple_cuts() -> None:
    plan = plan_of("auto")
    rows = rows_of(plan)
    kinds = {"v", "loop-2", "loop-3", "loop-4", "single"} & set(rows)
    assert ({"1f1b", "interleaved-1f1b", "even-cut", "histogram-cut"} <= set(rows), len(kinds)) == (True, 4)
    spans = [rows[name].span for name in ("even-cut", "histogram-cut", *kinds)]
    assert min(spans) >= plan.objective * (1 - 1e-9)
    # Two kinds of blocks are dealt like one: the longest run of equal blocks is not all of them.
    rows = rows_of(plan_of("two-kinds"))
    assert rows["1f1b"].layers_per_stage == (5, 5)
    spans = [rows[name].span for name in ("1f1b", "interleaved-1f1b", "even-cut")]
    assert spans == pytest.approx([2088.64, 1998.33, 1968.32])


@pytest.mark.parametrize("name", ["two-kinds", "heavy-head"])
def test_a_baseline_states_the_best_cut_for_its_order(name: str) -> None:
    problem = plan_of(name).problem
    for row in compare(problem):
        recut, orders = classical(row.name, problem)
        assert recut.model is not None
        assert recut.model.cut.bounds == (0, *accumulate(row.layers_per_stage or ()))
        assert row.recompute in (None, recut.model.cut.recompute)
        assert (row.recompute is None) == (name == "two-kinds")
        assert evaluate(recut, orders).span == row.span
        assert row.span <= evaluate(*baseline(row.name, problem)).span * (1 + 1e-9), row.name
    for ours, theirs in (("1f1b", "1F1B"), ("gpipe", "GPipe")):
        schedule = torch_schedule(theirs, problem.pp_degree, problem.microbatches)
        best = best_cut(uncut(problem, schedule.placement), [schedule], effort="quick")
        assert best.is_optimal
        assert rows_of(plan_of(name))[ours].span == pytest.approx(best.objective)
    six = layered(pp_degree=4, layers=[layer("a", 1, repeat=6)], placement="single")
    names = baseline_names(search(six, QUICK).problem)  # too few layers for a V
    assert set(BASELINES) - set(names) == {"interleaved-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v"}
    by_stages = replace(problem, model=None)
    assert classical("1f1b", by_stages)[0] == merge_stages(by_stages)


def test_with_a_limit_a_cut_that_fits_is_preferred_and_stages_may_be_recomputed() -> None:
    free = rows_of(plan_of("ample"))["1f1b"]
    tight, gpipe = (rows_of(plan_of("tight"))[row] for row in ("1f1b", "gpipe"))
    assert (free.fits, tight.fits, any(tight.recompute or ())) == (True, True, True)
    assert (max(free.peak_memory) > 20, tight.span > free.span) == (True, True)
    # GPipe holds all microbatches; no cut fits, so it has the best cut without the limit.
    assert (gpipe.fits, any(gpipe.recompute or ())) == (False, False)


def test_a_plan_knows_the_devices_and_links_of_its_ranks() -> None:
    problem = layered(**cuts.MIXED, placement="single", memory={"limit": [60, 60, 30]})
    plan: Any = search(problem, QUICK)
    assert check_plan(plan_json(plan), problem).problem == plan.problem
    assert plan.cut.lower_bound <= bound_over_all_cuts(problem) * (1 + 1e-9)
    assert sum(len(plan.problem.model.partition[stage]) for stage in plan.problem.placement.stages_of[2]) <= 3
    with pytest.raises(zbv.InvalidInput, match="/devices"):
        best_cut(problem, [])  # an executor's order needs equal ranks


def test_baselines_hold_the_static_memory_of_their_layers() -> None:
    """1F1B's last rank has the last stage of the model; in a V, the first rank has it."""
    problem = layered(layers=[EMBEDDING, BLOCK, {**HEAD, "memory": {"static": 100}}])
    cut = problem.cut_into(problem.placements[0], Cut.at((0, 3, 5, 8, 10)))
    rows = rows_of(search(cut, QUICK))
    assert list(cut.memory.static) == [103, 5]
    for name, rank in (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 1), ("zb-v", 0), ("v-min", 0)):
        peaks = rows[name].peak_memory
        assert peaks[rank] > 100 > peaks[1 - rank]


def test_claims_about_a_cut_are_checked() -> None:
    document = plan_json(plan_of("heavy-head"))
    at = [row["name"] for row in document["baselines"]].index("1f1b")

    def claim(**changes: Any) -> Claim:
        rows = list(document["baselines"])
        rows[at] = rows[at] | changes
        claims = check_plan(document | {"baselines": rows}).claims
        return next(claim for claim in claims if claim.pointer == f"/baselines/{at}")

    assert claim().is_verified
    assert "that no cut is better for its order was not verified" in claim().reason
    assert not claim(layers_per_stage=None).is_verified
    for layers, says in (
        ([4, 4, 4, 4], "stated span of baseline 1f1b"),
        ([8, 4, 4], "has 3 stages with 16 layers, which the schedule cannot have"),
        ([4, 4, 4, 5], "the problem has 16 layers on 4 ranks"),
    ):
        with pytest.raises(zbv.InvalidPlan, match=says):
            claim(layers_per_stage=layers)
