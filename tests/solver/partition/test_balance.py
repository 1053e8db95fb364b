"""Cuts with even loads: exactly the best there is, and what no cut can beat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import every_cut, layered, layered_problems, worst_load
from zbv_solver.partition.balance import balanced_cut, smallest_cut
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import even_cut, histogram_cut, level_cut
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.settle import settled_cut
from zbv_solver.problem.layered_problem import LayeredProblem


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


@settings(max_examples=60)
@given(layered_problems(most_layers=6) | layered_problems(most_layers=6, mixed=True))
def test_the_balanced_cut_is_the_best_of_all(problem: LayeredProblem) -> None:
    space = space_of(problem)
    found = balanced_cut(space, level_cut(space))
    best = min(map(worst_load, every_cut(problem, space.placement)), default=None)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.value == pytest.approx(best)
    made = problem.cut_into(space.placement, found.cut)
    made.require_feasible()
    assert worst_load(made) == pytest.approx(best)
    assert space.allows(space.bounds_of(found.cut))


@settings(max_examples=30)
@given(layered_problems(most_layers=8, memory={"limit": 12}), st.floats(0, 1))
def test_a_known_bound_does_not_change_the_least_load(problem: LayeredProblem, share: float) -> None:
    space = space_of(problem)
    found = balanced_cut(space, level_cut(space))
    worst = None if found is None else found.value
    with_bound = balanced_cut(space, level_cut(space), least=share * (worst or 1.0))
    assert (None if with_bound is None else with_bound.value) == pytest.approx(worst)


def test_a_rank_that_can_pass_on_more_than_the_others_can_take_is_no_dead_end() -> None:
    """The best cut is (1+1, 10.1+0.05, 10+0+0.6); the next one has a rank with 10.7."""
    layers = [
        {"name": f"l{at}", "forward": load, "backward_input": 0, "backward_weight": 0}
        for at, load in enumerate((1, 10.1, 10, 0, 0.6, 0.05, 1))
    ]
    space = space_of(layered(pp_degree=3, layers=layers))
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    assert balanced.value == pytest.approx(10.6)


@settings(max_examples=40)
@given(
    layered_problems(most_layers=6, memory={"limit": 3})
    | layered_problems(most_layers=6, mixed=True, memory={"limit": 3})
)
def test_the_smallest_cut_needs_the_least_of_all(problem: LayeredProblem) -> None:
    space = space_of(problem)
    found = smallest_cut(space, level_cut(space))
    assert found is not None
    unlimited = replace(problem, limit=None)
    least = min(max(cut.smallest_limit) for cut in every_cut(unlimited, space.placement))
    assert max(problem.cut_into(space.placement, found.cut).smallest_limit) == pytest.approx(least)


@settings(max_examples=60)
@given(
    layered_problems(most_layers=4, placements=("v", "single", "loop"))
    | layered_problems(most_layers=5, placements=("v", "single", "loop"), mixed=True)
)
def test_no_cut_is_below_the_floor(problem: LayeredProblem) -> None:
    space = space_of(problem)
    floor = least_worst_load(problem, space.tables)
    for cut in every_cut(problem, space.placement):
        assert worst_load(cut) >= floor * (1 - 1e-9)
    fitting = space.fitting(settled_cut(space, level_cut(space)))
    if fitting is not None:
        made = problem.cut_into(space.placement, fitting)
        assert space.worst_load(fitting) == pytest.approx(worst_load(made))


def test_the_floor_is_a_sum_of_whole_layers() -> None:
    # 8 blocks of 5, an embedding of 2 and a head of 15 are 57: the mean is 28.5, and no set of layers has
    # a load between that and 30 = 6 * 5.
    problem = layered()
    assert least_worst_load(problem, CutTables.of(problem)) == 30


def test_the_floor_is_no_sum_of_a_few_kinds_of_layers() -> None:
    """Two ranks can have 39 and 37. The kinds of layers that are packed have no set with a load of 39."""
    layers = [
        {"name": name, "forward": cost, "backward_input": 0, "backward_weight": 0, "repeat": copies}
        for name, cost, copies in (("a", 8, 1), ("b", 9, 4), ("c", 10, 1), ("d", 8, 1), ("e", 7, 2))
    ]
    problem = layered(pp_degree=2, layers=layers, cut={"allow_empty": True})
    least = min(map(worst_load, every_cut(problem, problem.placements[0])))
    assert least_worst_load(problem, CutTables.of(problem)) <= least * (1 + 1e-9)


def test_some_rank_has_more_parts_than_the_mean_rank() -> None:
    # 16 blocks of 10, an embedding of 6, a head of 22 on 4 ranks: the mean is 47, and embedding, head and two
    # blocks would be 48. But of the 17 largest some rank has 5.
    layers = [
        {"name": name, "forward": cost, "backward_input": 0, "backward_weight": 0, "repeat": copies}
        for name, cost, copies in (("embedding", 6, 1), ("block", 10, 16), ("head", 22, 1))
    ]
    problem = layered(pp_degree=4, layers=layers)
    assert least_worst_load(problem, CutTables.of(problem)) == pytest.approx(50)


def test_the_floor_counts_what_memory_forces_to_be_recomputed() -> None:
    block = {"forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 4}
    again = {"backward_input": 2, "memory": {"forward": 1, "backward_weight": -1}}
    layers = [{"name": "a", **block, "memory": {"forward": 3, "backward_weight": -3}, "recompute": again}]
    free = layered(layers=layers, memory={"limit": 6})
    assert least_worst_load(free, CutTables.of(free)) == 6
    tight = layered(layers=layers, memory={"limit": 4})  # 12 in all, room for 8: two blocks at least
    assert least_worst_load(tight, CutTables.of(tight)) == 7


@pytest.mark.parametrize("cost", [1e3, 1e9, 5e13])
def test_recomputing_that_saves_nothing_costs_nothing_however_much_it_takes(cost: float) -> None:
    again = {"backward_input": cost, "memory": {"forward": 3, "backward_weight": -3}}
    block = {"forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 4}
    layers = [{"name": "a", **block, "memory": {"forward": 3, "backward_weight": -3}, "recompute": again}]
    problem = layered(layers=layers, placement="single", memory={"limit": 5})
    with np.errstate(all="raise"):
        assert least_worst_load(problem, CutTables.of(problem)) == 6


def test_cuts_are_settled_where_a_rank_recomputes_more_stages_than_eight() -> None:
    """At the start, one rank has 27 of 36 layers, and fits with all of its nine stages recomputed."""
    block = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    held = {"forward": 4, "backward_weight": -4}
    again = {"backward_input": 2, "memory": {"forward": 1, "backward_weight": -1}}
    layers = [{"name": "a", **block, "memory": held, "recompute": again, "repeat": 36}]
    space = space_of(layered(layers=layers, placement="loop", chunks=9, memory={"limit": 27}))
    uneven = (*(2 * stage + stage % 2 for stage in range(space.n_stages)), 36)
    start = space.fitting(uneven)
    assert start is not None
    settled = space.fitting(settled_cut(space, uneven))
    assert settled is not None
    assert space.worst_load(settled) < 0.7 * space.worst_load(start)


@given(layered_problems(placements=("loop", "v", "single")))
def test_simple_and_settled_cuts_keep_the_rules(problem: LayeredProblem) -> None:
    space = space_of(problem)
    level = level_cut(space)
    for bounds in (even_cut(space), histogram_cut(space), level, settled_cut(space, level)):
        assert space.allows(bounds)


def test_settling_evens_out_the_loads_of_a_loop() -> None:
    problem = layered(placement="loop", chunks=2)
    space = space_of(problem)
    best = min(map(worst_load, every_cut(problem, space.placement)))
    even = even_cut(space)
    assert space.worst_load(space.cut(even, (False,) * 4)) > best
    settled = space.fitting(settled_cut(space, even))
    assert settled is not None
    assert space.worst_load(settled) == best


def test_the_histogram_cut_is_that_of_gpipe() -> None:
    """The example of costs 10, 40, 30, 10, 20, 50, 10 in three: 2, 3 and 2 layers."""
    layers = [
        {"name": f"l{number}", "forward": cost, "backward_input": 0, "backward_weight": 0}
        for number, cost in enumerate((10, 40, 30, 10, 20, 50, 10))
    ]
    problem = layered(pp_degree=3, placement="single", layers=layers)
    assert histogram_cut(space_of(problem)) == (0, 2, 5, 7)


def test_the_even_cut_deals_blocks_and_leaves_the_ends_on_top() -> None:
    assert even_cut(space_of(layered())) == (0, 3, 5, 7, 10)


def test_the_even_cut_deals_blocks_that_are_two_layers_each() -> None:
    layers = [{"name": "embedding", "forward": 1, "backward_input": 1, "backward_weight": 1}]
    for number in range(6):
        for part, cost in (("attention", 2), ("mlp", 3)):
            name = f"{part}.{number}"
            layers.append({"name": name, "forward": cost, "backward_input": cost, "backward_weight": cost})
    layers += [{"name": "head", "forward": 9, "backward_input": 9, "backward_weight": 9}]
    assert even_cut(space_of(layered(pp_degree=2, layers=layers))) == (0, 4, 7, 10, 14)


def test_the_even_cut_of_layers_that_are_all_different_deals_all_of_them() -> None:
    layers = [
        {"name": f"l{number}", "forward": cost, "backward_input": 0, "backward_weight": 0}
        for number, cost in enumerate((9, 1, 2, 3, 4, 5, 6, 7))
    ]
    assert even_cut(space_of(layered(pp_degree=2, layers=layers))) == (0, 2, 4, 6, 8)


def test_of_equal_layers_every_stage_gets_as_many() -> None:
    block = {"name": "a", "forward": 1, "backward_input": 1, "backward_weight": 1, "repeat": 12}
    problem = layered(pp_degree=3, layers=[block])
    space = space_of(problem)
    found = balanced_cut(space, level_cut(space))
    assert found is not None
    assert np.diff(found.cut.bounds).tolist() == [2] * 6
