"""What is recomputed when memory is short: enough to keep the pipeline full, not only to be possible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, layered, layered_problems
from zbv_solver.bounds import lower_bound
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import CutSpace, CutTables, ScoredCut
from zbv_solver.partition.first_cuts import NEVER, level_cut, rooms, roomy_cuts, with_room
from zbv_solver.partition.joint_search import Judge, improve_cut, neighbour
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.layered import first_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

QUICK = SearchOptions(effort="quick", seed=1)
BLOCKS = 16


def short_of_memory(limit: float | None, placement: str = "v") -> LayeredProblem:
    """A model of 16 blocks that hold 4 each, or 1 when recomputed, on four ranks."""
    layers = [EMBEDDING, {**BLOCK, "repeat": BLOCKS, "recompute": RECOMPUTE}, HEAD]
    return layered(pp_degree=4, microbatches=16, layers=layers, placement=placement, memory={"limit": limit})


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


def reached(problem: LayeredProblem, recompute: bool) -> float:
    """The objective of a search on the most even cut with every stage recomputed, or none; inf: no fit."""
    space = space_of(replace(problem, limit=None))
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    cut = replace(balanced.cut, recompute=(recompute,) * space.n_stages)
    try:
        return search(problem.cut_into(space.placement, cut), QUICK).objective
    except InfeasibleMemory:
        return float("inf")


@pytest.mark.parametrize("limit", [24, 40])
def test_it_is_no_worse_than_all_stages_recomputed_nor_than_none(limit: float) -> None:
    problem = short_of_memory(limit)
    found = search(problem, QUICK)
    assert max(found.metrics.peak_memory) <= limit
    assert found.objective <= min(reached(problem, True), reached(problem, False)) * (1 + 1e-9)


def test_it_recomputes_more_than_what_is_needed_to_be_possible() -> None:
    problem = short_of_memory(32)
    space = space_of(problem)
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    found = search(problem, QUICK)
    assert found.problem.model is not None
    assert sum(found.problem.model.cut.recompute) > sum(balanced.cut.recompute)
    least = search(problem.cut_into(space.placement, balanced.cut), QUICK)
    assert found.objective < 0.9 * least.objective


@settings(max_examples=40)
@given(layered_problems(placements=("v", "single", "loop"), memory={"limit": 12}))
def test_cuts_with_room_to_spare_fit_and_keep_the_rules(problem: LayeredProblem) -> None:
    space = space_of(problem)
    for cut in roomy_cuts(space, level_cut(space)):
        assert space.allows(space.bounds_of(cut))
        assert space.excess(cut) <= 0


@settings(max_examples=30)
@given(layered_problems(placements=("v", "single"), memory={"limit": 12}))
def test_what_is_known_of_less_room_saves_work_and_changes_no_load(problem: LayeredProblem) -> None:
    space = space_of(problem)
    found = [space.worst_load(cut) for cut in roomy_cuts(space, level_cut(space))]
    alone = [balanced_cut(with_room(space, times), level_cut(space)) for times in rooms(space)]
    assert found == pytest.approx([each.value for each in alone if each is not None])


@pytest.mark.parametrize("limit", [4, 5, 6])
def test_the_first_plan_of_layers_has_the_full_bound_of_its_stages(limit: float) -> None:
    layer = {"name": "block", "forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 8}
    layer["memory"] = {"forward": 1, "backward_weight": -1}
    plan = first_plan(layered(pp_degree=4, microbatches=12, layers=[layer], memory={"limit": limit}))
    quick, full = (lower_bound(plan.problem, effort).value for effort in ("quick", "full"))
    assert quick < full
    assert plan.metrics.lower_bound == pytest.approx(full)


def test_without_a_limit_there_is_room_everywhere() -> None:
    space = space_of(short_of_memory(None))
    assert list(roomy_cuts(space, level_cut(space))) == []


def test_they_reach_from_what_is_needed_to_everything() -> None:
    space = space_of(short_of_memory(32))
    counts = {sum(cut.recompute) for cut in roomy_cuts(space, level_cut(space))}
    assert min(counts) <= 2
    assert max(counts) == 7  # the last stage is the head alone, which has no alternative
    assert len(counts) >= 5


def test_early_stages_are_recomputed_before_late_ones() -> None:
    space = space_of(short_of_memory(40))
    chosen = {cut.recompute for cut in roomy_cuts(space, level_cut(space))}
    first = [recompute for recompute in chosen if recompute == tuple(sorted(recompute, reverse=True))]
    assert any(0 < sum(recompute) < 7 for recompute in first)


def test_room_is_for_as_many_everywhere_or_for_more_where_activations_live_longer() -> None:
    space = space_of(short_of_memory(40))
    times = list(rooms(space))
    flat = [each for each in times if np.ptp(each) == 0]
    falling = [each for each in times if np.ptp(each) > 0 and (np.diff(each) <= 0).all() and each.max() < 9]
    assert [each.max() for each in flat] == pytest.approx([1, 1, 4 / 3, 2, 8 / 3, 4])
    assert len(falling) == len(flat)
    assert falling[-1][0, 0] == pytest.approx(8, rel=0.05)  # twice the mean, at the very beginning
    assert falling[-1][0, -1] == 1
    forced = [each for each in times if each.max() == NEVER]
    assert [int((each[0] == NEVER).sum()) for each in forced] == sorted(
        int((each[0] == NEVER).sum()) for each in forced
    )
    assert (forced[-1][0] == NEVER).all()
    assert all((each[1] == 1).all() for each in forced)


def test_room_is_made_for_activations_and_not_for_parameters() -> None:
    space = space_of(short_of_memory(32))
    n = space.tables.n
    twice = with_room(space, np.full((2, n), 2.0))
    plain = [bool(value) for value in np.zeros(space.n_stages)]
    bounds = level_cut(space)
    for rank, stages in enumerate(space.placement.stages_of):
        blocks = sum(min(bounds[stage + 1], BLOCKS + 1) - max(bounds[stage], 1) for stage in stages)
        chosen = tuple(plain[stage] for stage in stages)
        assert space.needs(bounds, rank, chosen) == blocks * (4 + 1)
        assert twice.needs(bounds, rank, chosen) == blocks * (2 * 4 + 1)


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_what_is_recomputed_in_any_case_stays_so(kept: list[bool]) -> None:
    space = space_of(short_of_memory(32))
    bounds = level_cut(space)
    fitting = space.fitting(bounds, tuple(kept))
    assert fitting is not None
    assert all(again or not keep for again, keep in zip(fitting.recompute, kept, strict=True))


def test_the_climb_finds_what_to_recompute_from_either_end() -> None:
    space = space_of(short_of_memory(40))
    bounds = level_cut(space)
    for cut in (space.fitting(bounds), space.cut(bounds, (True,) * 8)):
        assert cut is not None
        judge = Judge(space)
        start = ScoredCut(cut, judge.value(cut))
        climbed = improve_cut(judge, start, 300_000, 1, lambda: False)
        assert climbed.value < start.value
        assert space.excess(climbed.cut) <= 0


def test_stages_change_alone_in_runs_and_in_place_of_each_other() -> None:
    space = space_of(short_of_memory(200))
    bounds, random = level_cut(space), np.random.default_rng(1)

    def drawn(recompute: tuple[bool, ...]) -> set[tuple[bool, ...]]:
        start = space.cut(bounds, recompute)
        moves = (neighbour(space, start, random) for _ in range(1000))
        return {move.recompute for move in moves if move is not None and move.bounds == start.bounds}

    from_none = {sum(recompute) for recompute in drawn((False,) * 8)}
    assert from_none == set(range(9))
    assert (False,) * 7 + (True,) in drawn((True,) + (False,) * 7)


def test_a_bound_that_moves_leaves_what_is_recomputed() -> None:
    space = space_of(short_of_memory(18))
    bounds, random = level_cut(space), np.random.default_rng(1)
    start = space.cut(bounds, (True, False) * 4)
    moves = (neighbour(space, start, random) for _ in range(1000))
    moved = [move for move in moves if move is not None and move.bounds != start.bounds]
    assert moved
    assert any(move.recompute != start.recompute for move in moved)
    for move in moved:
        assert all(again for again, before in zip(move.recompute, start.recompute, strict=True) if before)


def test_a_judge_sees_that_a_tight_limit_slows_every_microbatch() -> None:
    # 16 microbatches are judged by 8 and 4; the most loaded rank's work alone would promise half of it.
    problem = short_of_memory(32)
    space = space_of(problem)
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    real = search(problem.cut_into(space.placement, balanced.cut), QUICK).objective
    judge = Judge(space)
    assert judge.value(balanced.cut) == pytest.approx(real, rel=0.15)
    assert judge.floor(balanced.cut) < 0.7 * real


def test_where_there_is_room_a_microbatch_takes_the_most_loaded_ranks_work() -> None:
    space = space_of(short_of_memory(200))
    plain = space.cut(level_cut(space), (False,) * 8)
    judge, first = Judge(space), Judge(replace_microbatches(space, 8))
    more = 8 * space.worst_load(plain)
    assert judge.value(plain) == pytest.approx(first.value(plain) + more)


def replace_microbatches(space: CutSpace, microbatches: int) -> CutSpace:
    return space_of(replace(space.problem, microbatches=microbatches))
