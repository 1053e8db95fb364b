"""The differences of two problems, in words."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from support.cut_models import cut_problem
from support.problems import problems, uniform
from zbv_service.pages.compare import differences
from zbv_solver.construct.baselines import merge_stages
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs


@given(problems(), problems())
def test_only_different_problems_have_differences(one: Problem, other: Problem) -> None:
    assert differences(one, one) == []
    assert bool(differences(one, other)) == (one != other)
    swapped = [(name, there, here) for name, here, there in differences(other, one)]
    assert [name for name, _, _ in swapped] == [name for name, _, _ in differences(one, other)]


def test_every_quantity_is_named_with_both_sides() -> None:
    one = uniform(2, 4, limit=8)
    other = replace(
        uniform(2, 6, limit=8, p2p=0.5, objective="makespan"), units=Units(time="us", memory="bytes")
    )
    assert differences(one, other) == [
        ("microbatches", "4", "6"),
        ("objective", "span", "makespan"),
        ("time unit", "none", "us"),
        ("memory unit", "none", "bytes"),
        ("transfer", "0", "0.5"),
    ]


def test_equal_ranges_with_different_values_are_counted() -> None:
    one = uniform(2, 4)
    costs = one.costs
    left = replace(one, costs=replace(costs, forward=(1.0, 2.0, 1.0, 1.0)))
    right = replace(one, costs=replace(costs, forward=(1.0, 1.0, 2.0, 1.0)))
    assert differences(left, right) == [("forward F", "1 to 2", "1 to 2, 2 of 4 differ")]


def test_equal_ranges_of_different_lengths_show_their_lengths() -> None:
    short, long = (replace(uniform(p, 4), costs=_rising(uniform(p, 4))) for p in (2, 3))
    found = differences(short, long)
    assert ("forward F", "1 to 2, 4 values", "1 to 2, 6 values") in found


def _rising(problem: Problem) -> Costs:
    return replace(problem.costs, forward=(1.0, *problem.costs.forward[2:], 2.0))


def test_a_different_cut_of_the_layers_is_a_difference() -> None:
    even, uneven = (cut_problem("abcd", sizes) for sizes in ([1, 1, 1, 1], [2, 0, 1, 1]))
    found = {name: values for name, *values in differences(even, uneven)}
    assert found["layers"] == ["4 in 4 stages", "4 in 4 stages, different layers or stages"]
    assert differences(even, replace(even, model=None)) == [("layers", "4 in 4 stages", "none")]


def test_rounding_is_no_difference() -> None:
    one = uniform(2, 4)
    near = (1.0 + 1e-14, 1.0, 2.0, 1.0)
    left = replace(one, costs=replace(one.costs, forward=(1.0, 2.0, 1.0, 1.0)))
    right = replace(one, costs=replace(one.costs, forward=near))
    assert differences(left, right) == [("forward F", "1 to 2", "1 to 2, 2 of 4 differ")]
    assert differences(one, replace(one, costs=replace(one.costs, forward=(*near[:2], 1.0, 1.0)))) == []


def test_another_placement_with_the_same_numbers_is_one_difference() -> None:
    one = uniform(2, 4)
    merged = merge_stages(one)
    assert [name for name, _, _ in differences(one, merged)][:1] == ["placement"]
    assert ("forward F", "1", "2") in differences(one, merged)


def test_microbatches_that_differ_are_compared_by_microbatch() -> None:
    def costing(tokens: list[int], forward: float) -> Problem:
        return parse_problem(
            {
                "pp_degree": 2,
                "microbatches": 2,
                "features": {"tokens": tokens},
                "costs": {"forward": {"tokens": forward}, "backward_input": 1, "backward_weight": 1},
            }
        )

    found = differences(costing([1, 3], 1), costing([1, 3], 2))
    assert found == [("forward F", "1 to 3", "2 to 6")]
    found = differences(costing([1, 3], 1), costing([3, 1], 1))
    assert found == [("forward F", "1 to 3", "1 to 3, 8 of 8 differ")]
    found = differences(costing([1, 3], 1), replace(costing([1, 3], 1), features=()))
    assert found[-1] == ("features", "tokens 1 to 3", "none")
