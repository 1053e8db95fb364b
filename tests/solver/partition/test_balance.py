"""Cuts with even loads: exactly the best there is, what no cut can beat, and cuts to begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuts import BLOCK, HEAD, every_cut, layered, layered_problems, worst_load
from zbv_solver.partition.balance import balanced_cut, smallest_cut
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import even_cut, histogram_cut, level_cut
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.settle import settled_cut
from zbv_solver.problem.layered_problem import LayeredProblem


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


def forwards(*costs: float, **more: Any) -> list[dict[str, Any]]:
    """Layers that only have forwards."""
    none = {"backward_input": 0, "backward_weight": 0, **more}
    return [{"name": f"l{at}", "forward": cost, **none} for at, cost in enumerate(costs)]


def copies(**kinds: tuple[float, int]) -> list[dict[str, Any]]:
    """Layers with this cost of forwards, and so many of each."""
    return [
        {**layer, "name": name, "repeat": kinds[name][1]}
        for name in kinds
        for layer in forwards(kinds[name][0])
    ]


def three(name: str, cost: float, **more: Any) -> dict[str, Any]:
    """A layer whose F, I and W take this long."""
    return {"name": name, "forward": cost, "backward_input": cost, "backward_weight": cost, **more}


def held(amount: float) -> dict[str, float]:
    return {"forward": amount, "backward_weight": -amount}


# --- exact methods for V and single


@settings(max_examples=60)
@given(layered_problems(most_layers=6) | layered_problems(most_layers=6, mixed=True), st.floats(0, 1))
def test_the_balanced_cut_is_the_best_of_all_whatever_bound_is_known(
    problem: LayeredProblem, share: float
) -> None:
    space = space_of(problem)
    best = min(map(worst_load, every_cut(problem, space.placement)), default=None)
    for least in (0.0, share * (best or 1.0)):
        found = balanced_cut(space, level_cut(space), least)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert found.value == pytest.approx(best)
        made = problem.cut_into(space.placement, found.cut)
        made.require_feasible()
        assert worst_load(made) == pytest.approx(best)
        assert space.allows(space.bounds_of(found.cut))


def test_a_rank_that_can_pass_on_more_than_the_others_can_take_is_no_dead_end() -> None:
    """The best cut is (1+1, 10.1+0.05, 10+0+0.6); the next one has a rank with 10.7."""
    space = space_of(layered(pp_degree=3, layers=forwards(1, 10.1, 10, 0, 0.6, 0.05, 1)))
    balanced = balanced_cut(space, level_cut(space))
    assert balanced is not None
    assert balanced.value == pytest.approx(10.6)


def test_of_equal_layers_every_stage_gets_as_many() -> None:
    space = space_of(layered(pp_degree=3, layers=[three("a", 1, repeat=12)]))
    found = balanced_cut(space, level_cut(space))
    assert found is not None
    assert np.diff(found.cut.bounds).tolist() == [2] * 6


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


# --- floors, and cuts for any placement

ANY = ("v", "single", "loop")


@settings(max_examples=60)
@given(
    layered_problems(most_layers=4, placements=ANY)
    | layered_problems(most_layers=5, placements=ANY, mixed=True)
)
def test_no_cut_is_below_the_floor_and_simple_cuts_keep_the_rules(problem: LayeredProblem) -> None:
    space = space_of(problem)
    floor = least_worst_load(problem, space.tables)
    for cut in every_cut(problem, space.placement):
        assert worst_load(cut) >= floor * (1 - 1e-9)
    level = level_cut(space)
    settled = settled_cut(space, level)
    for bounds in (even_cut(space), histogram_cut(space), level, settled):
        assert space.allows(bounds)
    fitting = space.fitting(settled)
    if fitting is not None:
        made = problem.cut_into(space.placement, fitting)
        assert space.worst_load(fitting) == pytest.approx(worst_load(made))


AGAIN = {"backward_input": 2, "memory": held(1)}
RECOMPUTED = [three("a", 1, repeat=4, memory=held(3), recompute=AGAIN)]
SLOW = {"slow": {"forward": 6, "backward_input": 6, "backward_weight": 2}}
SLOW_HEAD = {"slow": {"forward": 14, "backward_input": 14, "backward_weight": 14}}


@pytest.mark.parametrize(
    ("floor", "changes"),
    [
        # 8 blocks of 5, an embedding of 2 and a head of 15 are 57: the mean is 28.5, and no set of layers has
        # a load between that and 30 = 6 * 5.
        (30, {}),
        # Two ranks can have 39 and 37. The kinds of layers that are packed have no set with a load of 39.
        (39, {"layers": copies(a=(8, 1), b=(9, 4), c=(10, 1), d=(8, 1), e=(7, 2))}),
        # The mean is 47, and embedding, head and two blocks would be 48. But some rank has 5 of 17 blocks.
        (50, {"pp_degree": 4, "layers": copies(embedding=(6, 1), block=(10, 16), head=(22, 1))}),
        # 12 in all, and room for 8: two blocks at least are recomputed.
        (6, {"layers": RECOMPUTED, "memory": {"limit": 6}}),
        (7, {"layers": RECOMPUTED, "memory": {"limit": 4}}),
        # The mean is 55 / (2 + 55 / 154) = 23.3. A slow rank has one block of 14, and the fast ones have
        # blocks of 5 and the head of 15: with the other 7 blocks, one of them has 25.
        (
            25,
            {"pp_degree": 3, "placement": "single", "devices": ["slow", "fast", "fast"]}
            | {"layers": [{**BLOCK, "on": SLOW}, {**HEAD, "on": SLOW_HEAD}]},
        ),
    ],
)  # fmt: skip
def test_the_floor_counts_whole_layers_crowded_ranks_memory_and_devices(
    floor: float, changes: dict[str, Any]
) -> None:
    problem = layered(**changes)
    assert least_worst_load(problem, CutTables.of(problem)) == pytest.approx(floor)


@pytest.mark.parametrize("cost", [1e3, 5e13])
def test_recomputing_that_saves_nothing_costs_nothing_however_much_it_takes(cost: float) -> None:
    again = {"backward_input": cost, "memory": held(3)}
    layers = [three("a", 1, repeat=4, memory=held(3), recompute=again)]
    problem = layered(layers=layers, placement="single", memory={"limit": 5})
    with np.errstate(all="raise"):
        assert least_worst_load(problem, CutTables.of(problem)) == 6


def test_cuts_are_settled_where_a_rank_recomputes_more_stages_than_eight() -> None:
    """At the start, one rank has 27 of 36 layers, and fits with all of its nine stages recomputed."""
    layers = [three("a", 1, repeat=36, memory=held(4), recompute=AGAIN)]
    space = space_of(layered(layers=layers, placement="loop", chunks=9, memory={"limit": 27}))
    uneven = (*(2 * stage + stage % 2 for stage in range(space.n_stages)), 36)
    start, settled = space.fitting(uneven), space.fitting(settled_cut(space, uneven))
    assert start is not None
    assert settled is not None
    assert space.worst_load(settled) < 0.7 * space.worst_load(start)


def test_settling_evens_out_the_loads_of_a_loop() -> None:
    problem = layered(placement="loop", chunks=2)
    space = space_of(problem)
    best = min(map(worst_load, every_cut(problem, space.placement)))
    even = even_cut(space)
    assert space.worst_load(space.cut(even, (False,) * 4)) > best
    settled = space.fitting(settled_cut(space, even))
    assert settled is not None
    assert space.worst_load(settled) == best


GPIPE = forwards(10, 40, 30, 10, 20, 50, 10)
HALVES = [
    three("embedding", 1),
    *(three(f"{part}.{at}", cost) for at in range(6) for part, cost in (("attention", 2), ("mlp", 3))),
    three("head", 9),
]


@pytest.mark.parametrize(
    ("cut", "changes", "bounds"),
    [
        # The example of GPipe's cut in three: 2, 3 and 2 layers.
        (histogram_cut, {"layers": GPIPE, "placement": "single", "pp_degree": 3}, (0, 2, 5, 7)),
        # Blocks are dealt, of one layer or of two, and the ends are on top; different layers are dealt all.
        (even_cut, {}, (0, 3, 5, 7, 10)),
        (even_cut, {"layers": HALVES}, (0, 4, 7, 10, 14)),
        (even_cut, {"layers": forwards(9, 1, 2, 3, 4, 5, 6, 7)}, (0, 2, 4, 6, 8)),
    ],
)  # fmt: skip
def test_usual_cuts(cut: Callable[[CutSpace], Any], changes: dict[str, Any], bounds: tuple[int, ...]) -> None:
    assert cut(space_of(layered(**changes))) == bounds
