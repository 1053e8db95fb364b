"""The cut that needs the least memory: as brute force says, and proved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, every_cut, layered, layered_problems
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.partition import first_cuts, least_memory
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.partition.first_cuts import level_cut
from zbv_solver.partition.least_memory import least_memory_cut, surely_lacking
from zbv_solver.partition.settle import settled_cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

QUICK = SearchOptions(effort="quick", seed=1)


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


def loop(*amounts: tuple[int, int, int], **more: Any) -> LayeredProblem:
    """Layers of equal times in a loop, each with what F holds, static memory and workspace."""
    layers = [
        {"name": f"l{at}", "forward": 1, "backward_input": 1, "backward_weight": 1}
        | {"memory": {"forward": f, "backward_weight": -f, "static": static, "workspace": workspace}}
        for at, (f, static, workspace) in enumerate(amounts)
    ]
    return layered(placement="loop", layers=layers, **more)


def excess(needs: tuple[float, ...], limits: tuple[float, ...] | None) -> float:
    assert limits is not None
    return max(need - limit for need, limit in zip(needs, limits, strict=True))


FRONT_HEAVY = loop(*[(6, 0, 0)] * 4, *[(1, 0, 0)] * 8, memory={"limit": 17})
"""All of the memory is at the front: what is level in work lacks 12 on rank 0."""


@settings(max_examples=25)
@given(
    layered_problems(most_layers=5, placements=("loop", "v"), memory={"limit": 6})
    | layered_problems(most_layers=4, placements=("loop",), mixed=True, memory={"limit": 6})
)
def test_it_is_the_least_of_all_cuts(problem: LayeredProblem) -> None:
    space = space_of(problem)
    unlimited = replace(problem, limit=None)
    least = min(excess(cut.smallest_limit, problem.limit) for cut in every_cut(unlimited, space.placement))
    found = least_memory_cut(space, level_cut(space))
    made = problem.cut_into(space.placement, found.cut)
    assert excess(made.smallest_limit, problem.limit) == pytest.approx(least, abs=1e-4)
    assert (found.value, found.bound) == pytest.approx((least, least), abs=1e-4)
    assert surely_lacking(space.tables) <= least + 1e-4


SEVEN = [(2, 1, 1)] * 7


@pytest.mark.parametrize(
    ("first", "limit", "lacking"),
    [
        ((2, 1, 1), [3, 2], (8 * 3 - 5) / 2),
        ((9, 9, 1), [16, 30], -3.5),  # 39 of 46; and 19 fits rank 1
        ((9, 9, 1), 18, 1.5),
    ],
)
def test_what_one_part_or_all_of_them_lack_needs_no_search(
    first: tuple[int, int, int], limit: Any, lacking: float
) -> None:
    space = space_of(loop(first, *SEVEN, memory={"limit": limit}))
    assert surely_lacking(space.tables) == pytest.approx(lacking, abs=1e-4)


FALSE_OPTIMUM = ((2, 3, 1), (2, 0, 1), (2, 3, 0), (2, 0, 0), (2, 0, 0), (2, 0, 0), (2, 0, 1), (1, 3, 0))


@pytest.mark.parametrize(
    ("problem", "least"),
    [
        # OR-Tools 9.15 answers 4 with "optimal", unless its detection of included sets is off.
        (loop(*FALSE_OPTIMUM, pp_degree=3, memory={"limit": [5, 8, 5]}, cut={"first": 1}), 3),
        # A stage is a run of layers: with layers picked at will it would be 9.
        (loop(*((held, 0, 0) for held in (9, 2, 1, 9, 2, 5, 2)), memory={"limit": 6}), 10),
    ],
)
def test_the_proof_is_right_where_it_is_easily_wrong(problem: LayeredProblem, least: float) -> None:
    found = least_memory_cut(space_of(problem), level_cut(space_of(problem)))
    assert (found.value, found.bound) == pytest.approx((least, least), abs=1e-4)


@pytest.mark.parametrize("limit", [40, 10])
def test_asked_for_any_cut_that_fits_it_proves_no_more_than_that(limit: float) -> None:
    space = space_of(layered(placement="loop", memory={"limit": limit}))
    found = least_memory_cut(space, level_cut(space), enough=0)
    assert (found.value <= 0) == (found.bound == -np.inf) == (limit == 40)
    assert limit == 40 or 0 < found.bound <= found.value


def test_a_cut_that_fits_is_settled_or_else_searched_in_earnest(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(FRONT_HEAVY)
    level = level_cut(space)
    assert space.fitting(level) is None
    assert space.fitting(settled_cut(space, level)) is not None
    for module in (first_cuts, least_memory):
        monkeypatch.setattr(module, "settled_cut", lambda space, start, seed=0: start)
    found = least_memory_cut(space, level, enough=0)
    assert found.value <= 0
    assert found.bound == -np.inf  # it stopped at the first that fits
    assert max(search(FRONT_HEAVY, QUICK).metrics.peak_memory) <= 17


@pytest.mark.parametrize("placement", ["v", "loop", "auto"])
def test_that_nothing_fits_is_proved(placement: str) -> None:
    def plan(limit: float) -> None:
        layers = [EMBEDDING, {**BLOCK, "recompute": RECOMPUTE}, HEAD]
        search(layered(placement=placement, layers=layers, memory={"limit": limit}), QUICK)

    with pytest.raises(InfeasibleMemory, match=r"no plan fits.*the closest cut would need") as caught:
        plan(9)
    assert caught.value.is_proved
    least = max(caught.value.smallest)
    plan(least)
    with pytest.raises(InfeasibleMemory):
        plan(least - 0.01)


def test_what_the_effort_does_not_prove_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.partition.least_memory.EFFORT", 0.0)
    # 11 layers of 2 on two ranks: 22 is less than 2 * 11.5, and one rank has 12.
    with pytest.raises(InfeasibleMemory, match="It is not proved that no other cut fits") as caught:
        search(loop(*[(2, 0, 0)] * 11, memory={"limit": 11.5}), QUICK)
    assert not caught.value.is_proved
