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
from zbv_solver.partition.cut_space import CutSpace, CutTables, ScoredCut
from zbv_solver.partition.first_cuts import level_cut
from zbv_solver.partition.least_memory import least_memory_cut, surely_lacking
from zbv_solver.partition.settle import settled_cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

QUICK = SearchOptions(effort="quick", seed=1)


def space_of(problem: LayeredProblem) -> CutSpace:
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


def lacking(space: CutSpace, found: ScoredCut) -> float:
    """What the worst rank of a cut lacks, by the problem of its stages."""
    problem = space.problem.cut_into(space.placement, found.cut)
    return excess(problem.smallest_limit, space.problem.limit)


def excess(needs: tuple[float, ...], limits: tuple[float, ...] | None) -> float:
    assert limits is not None
    return max(need - limit for need, limit in zip(needs, limits, strict=True))


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
    assert lacking(space, found) == pytest.approx(least, abs=1e-4)
    assert found.value == pytest.approx(least, abs=1e-4)
    assert found.bound == pytest.approx(least, abs=1e-4)
    assert surely_lacking(space.tables) <= least + 1e-4


def test_what_one_part_or_all_of_them_lack_needs_no_search() -> None:
    layers = [layer(number, 2, 1, 1) for number in range(8)]
    tight = space_of(layered(placement="loop", layers=layers, memory={"limit": [3, 2]}))
    assert surely_lacking(tight.tables) == pytest.approx((8 * 3 - 5) / 2, abs=1e-4)
    large = [layer(0, 9, 9, 1), *layers[1:]]
    uneven = space_of(layered(placement="loop", layers=large, memory={"limit": [16, 30]}))
    assert surely_lacking(uneven.tables) == pytest.approx(-3.5, abs=1e-4)  # 39 of 46; and 19 fits rank 1
    small = space_of(layered(placement="loop", layers=large, memory={"limit": 18}))
    assert surely_lacking(small.tables) == pytest.approx(1.5, abs=1e-4)


def layer(number: int, held: int, static: int, workspace: int) -> dict[str, Any]:
    memory = {"forward": held, "backward_weight": -held, "static": static, "workspace": workspace}
    return {"name": f"l{number}", "forward": 1, "backward_input": 1, "backward_weight": 1, "memory": memory}


def test_a_false_optimum_of_the_presolve_is_not_believed() -> None:
    # OR-Tools 9.15 answers 4 with "optimal", unless its detection of included sets is off.
    each = [(2, 3, 1), (2, 0, 1), (2, 3, 0), (2, 0, 0), (2, 0, 0), (2, 0, 0), (2, 0, 1), (1, 3, 0)]
    problem = layered(
        pp_degree=3,
        placement="loop",
        layers=[layer(number, *amounts) for number, amounts in enumerate(each)],
        memory={"limit": [5, 8, 5]},
        cut={"first": 1},
    )
    space = space_of(problem)
    found = least_memory_cut(space, level_cut(space))
    assert found.value == pytest.approx(3, abs=1e-6)
    assert found.bound == pytest.approx(3, abs=1e-6)


def test_a_stage_is_a_run_of_layers_in_the_proof_too() -> None:
    layers = [layer(number, held, 0, 0) for number, held in enumerate((9, 2, 1, 9, 2, 5, 2))]
    space = space_of(layered(placement="loop", layers=layers, memory={"limit": 6}))
    found = least_memory_cut(space, level_cut(space))
    assert found.value == pytest.approx(10, abs=1e-4)  # with layers picked at will it would be 9
    assert found.bound == pytest.approx(10, abs=1e-4)


def test_asked_for_any_cut_that_fits_it_proves_no_more_than_that() -> None:
    roomy = space_of(layered(placement="loop", memory={"limit": 40}))
    found = least_memory_cut(roomy, level_cut(roomy), enough=0)
    assert found.value <= 0
    assert found.bound == -np.inf
    tight = space_of(layered(placement="loop", memory={"limit": 10}))
    none = least_memory_cut(tight, level_cut(tight), enough=0)
    assert none.value > 0
    assert 0 < none.bound <= none.value


def test_settling_goes_where_it_fits_from_where_it_does_not() -> None:
    # All of the memory is at the front: what is level in work lacks 12 on rank 0.
    layers = [layer(number, 6 if number < 4 else 1, 0, 0) for number in range(12)]
    space = space_of(layered(placement="loop", layers=layers, memory={"limit": 17}))
    level = level_cut(space)
    assert space.fitting(level) is None
    assert space.fitting(settled_cut(space, level)) is not None


def test_a_cut_that_settling_misses_is_searched_in_earnest(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (first_cuts, least_memory):
        monkeypatch.setattr(module, "settled_cut", lambda space, start, seed=0: start)
    layers = [layer(number, 6 if number < 4 else 1, 0, 0) for number in range(12)]
    space = space_of(layered(placement="loop", layers=layers, memory={"limit": 17}))
    found = least_memory_cut(space, level_cut(space), enough=0)
    assert found.value <= 0
    assert found.bound == -np.inf  # it stopped at the first that fits
    plan = search(layered(placement="loop", layers=layers, memory={"limit": 17}), QUICK)
    assert max(plan.metrics.peak_memory) <= 17


@pytest.mark.parametrize("placement", ["v", "loop", "auto"])
def test_that_nothing_fits_is_proved(placement: str) -> None:
    layers = [EMBEDDING, {**BLOCK, "recompute": RECOMPUTE}, HEAD]
    with pytest.raises(InfeasibleMemory) as caught:
        search(layered(placement=placement, layers=layers, memory={"limit": 9}), QUICK)
    error = caught.value
    assert error.is_proved
    assert "no plan fits" in str(error)
    assert "the closest cut would need" in str(error)
    least = max(error.smallest)
    search(layered(placement=placement, layers=layers, memory={"limit": least}), QUICK)
    with pytest.raises(InfeasibleMemory):
        search(layered(placement=placement, layers=layers, memory={"limit": least - 0.01}), QUICK)


def test_what_the_effort_does_not_prove_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbv_solver.partition.least_memory.EFFORT", 0.0)
    # 11 layers of 2 on two ranks: 22 is less than 2 * 11.5, and one rank has 12.
    layers = [layer(number, 2, 0, 0) for number in range(11)]
    with pytest.raises(InfeasibleMemory) as caught:
        search(layered(placement="loop", layers=layers, memory={"limit": 11.5}), QUICK)
    assert not caught.value.is_proved
    assert "It is not proved that no other cut fits" in str(caught.value)
