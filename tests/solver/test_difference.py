"""What is said of two problems that differ."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from support.problems import problems, uniform
from zbv_solver.construct.baselines import merge_stages
from zbv_solver.difference import Difference, differences
from zbv_solver.problem import Problem, Units


@given(problems(), problems())
def test_nothing_is_said_of_equal_problems_and_something_of_others(one: Problem, other: Problem) -> None:
    assert differences(one, one) == ()
    assert bool(differences(one, other)) == (one != other)
    swapped = [(each.name, each.there, each.here) for each in differences(other, one)]
    assert [name for name, _, _ in swapped] == [each.name for each in differences(one, other)]


def test_every_quantity_is_named_with_both_sides() -> None:
    one = uniform(2, 4, limit=8)
    other = replace(
        uniform(2, 6, limit=8, p2p=0.5, objective="makespan"), units=Units(time="us", memory="bytes")
    )
    assert differences(one, other) == (
        Difference("microbatches", "4", "6"),
        Difference("objective", "span", "makespan"),
        Difference("time unit", "none", "us"),
        Difference("memory unit", "none", "bytes"),
        Difference("transfer", "0", "0.5"),
    )


def test_ranges_that_read_alike_are_told_apart_by_how_many_differ() -> None:
    one = uniform(2, 4)
    costs = one.costs
    left = replace(one, costs=replace(costs, forward=(1.0, 2.0, 1.0, 1.0)))
    right = replace(one, costs=replace(costs, forward=(1.0, 1.0, 2.0, 1.0)))
    assert differences(left, right) == (Difference("forward F", "1 to 2", "1 to 2, 2 of 4 differ"),)


def test_another_placement_with_the_same_numbers_differs_only_in_that() -> None:
    one = uniform(2, 4)
    merged = merge_stages(one)
    assert [each.name for each in differences(one, merged)][:1] == ["placement"]
    assert Difference("forward F", "1", "2") in differences(one, merged)
