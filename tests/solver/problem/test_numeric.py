"""Accepted numbers, their normalisation, and common units of costs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.problems import decades, rough_problems, uniform
from zbv_solver.documents.files import decode_json
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import (
    FEASIBLE_MEMORY,
    MEMORY_TOLERANCE,
    are_numbers,
    broken_rule,
    clean_deltas,
    exceeds,
    integer_scale,
)
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.stages import Memory
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import in_search_unit
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify, verify_orders

MANY = 1 << 40


@pytest.mark.parametrize(
    ("values", "integers"),
    [
        ([2, 4], [1, 2]),
        ([1, 3], [1, 3]),
        ([0.5, 0.25], [2, 1]),
        ([0.1, 0.2, 0.3, 0.1 + 0.2], [1, 2, 3, 3]),
        ([1 / 3, 2 / 3, 1, 0], [1, 2, 3, 0]),
        ([3e-10, 2e-10, 5e-10], [3, 2, 5]),
        ([1e12, 3e12], [1, 3]),
        ([123.456, 1000.001, 77.123456], [15_432_000, 125_000_125, 9_640_432]),
        ([1e12, 1], [10**12, 1]),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 2.0**-70, 2.0**60])
def test_costs_with_a_common_unit_become_integers(
    values: list[float], integers: list[int], factor: float
) -> None:
    scale = integer_scale([value * factor for value in values], MANY)
    assert scale is not None
    assert [value * factor * scale for value in values] == pytest.approx(integers, rel=1e-12)


@example([1.0, math.nan], False)
@given(st.lists(st.floats() | st.integers(-3, 3).map(float), max_size=5), st.booleans())
def test_numbers_are_valid_together_if_each_of_them_is(values: list[float], signed: bool) -> None:
    broken = [value for value in values if broken_rule(value, signed) is not None]
    if are_numbers(values, signed):
        assert not broken
    else:
        assert broken or 0.0 in values


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_zeros_have_any_unit(values: list[float]) -> None:
    assert integer_scale(values, MANY) == 1


@pytest.mark.parametrize("values", [[1e15, 1.0], [math.pi, math.e, math.sqrt(2), math.sqrt(3)]])
def test_costs_without_a_common_unit_have_none(values: list[float]) -> None:
    assert integer_scale(values, MANY) is None


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=12), decades(1e-90, 1e10))
def test_the_integers_do_not_depend_on_the_unit(values: list[int], unit: float) -> None:
    scale = integer_scale([value * unit for value in values], MANY)
    assert scale is not None
    divisor = math.gcd(*values)
    assert [round(value * unit * scale) for value in values] == [value // divisor for value in values]


@given(rough_problems())
def test_costs_in_the_search_s_unit_equal_the_caller_s_costs(problem: Problem) -> None:
    own, unit = in_search_unit(problem)
    largest = float(problem.arrays.duration.max())
    for letter in range(4):
        ours, theirs = own.arrays.duration[letter, :, 0], problem.arrays.duration[letter, :, 0]
        assert ours * unit == pytest.approx(theirs, rel=1e-10, abs=largest * 1e-90)


@given(decades(1e-100, 1e15), st.floats(-1.5, 1.5))
def test_clean_deltas_sum_to_zero_and_are_a_fixed_point(forward: float, share: float) -> None:
    held = np.array([forward])
    inputs, weights = clean_deltas(held, share * held)
    assert held + inputs + weights == 0
    assert weights <= 0
    assert clean_deltas(held, inputs) == (inputs, weights)


@given(rough_problems())
def test_documents_round_trip_and_every_microbatch_releases_its_memory(problem: Problem) -> None:
    again = parse_problem(problem_json(problem))
    assert again == problem
    assert problem_json(again) == problem_json(problem)
    delta = problem.arrays.delta
    assert (delta[F] + delta[I] + delta[W] == 0).all()
    assert (delta[F] + delta[B] == 0).all()


@pytest.mark.parametrize("limit", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("tolerance", [MEMORY_TOLERANCE, FEASIBLE_MEMORY])
def test_the_memory_tolerance_is_relative(limit: float, tolerance: float) -> None:
    assert not exceeds(limit * (1 + tolerance / 2), limit, tolerance)
    assert exceeds(limit * (1 + 2 * tolerance), limit, tolerance)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_feasibility_and_the_verifier_tolerate_the_same_share_in_every_unit(unit: float) -> None:
    """With an absolute tolerance, tiny limits would not hold, and large ones would refuse rounding."""
    problem, orders = uniform(1, 1), Orders.from_text([["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]])

    def below_the_need(share: float) -> Problem:
        memory = Memory(
            forward=(unit, unit),
            backward_input=(-unit / 2, -unit / 2),
            backward_weight=(-unit / 2, -unit / 2),
            static=(0.0,),
            limit=(2 * unit * (1 - share),),
        )
        return replace(problem, memory=memory)

    below_the_need(FEASIBLE_MEMORY / 2).require_feasible()
    with pytest.raises(InfeasibleMemory):
        below_the_need(2 * FEASIBLE_MEMORY).require_feasible()
    verify_orders(below_the_need(MEMORY_TOLERANCE / 2), orders)
    with pytest.raises(InvalidPlan, match="memory"):
        verify_orders(below_the_need(2 * MEMORY_TOLERANCE), orders)


def test_stated_deltas_are_kept_in_the_document() -> None:
    """They are part of a plan's identity: the hashes of stored plans must not change."""
    deltas = {"forward": 0.3, "backward_input": -0.1, "backward_weight": -0.2}
    problem = parse_problem({**DOCUMENT, "memory": deltas})
    assert problem_json(problem)["memory"]["backward_weight"] == [-0.2, -0.2]
    assert problem.arrays.delta[W, :, 0].tolist() == [-(0.3 - 0.1)] * 2


DOCUMENT = {
    "pp_degree": 1,
    "microbatches": 100,
    "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1},
}


@pytest.mark.parametrize("weight", [-0.4999999995, -0.5000000005, -0.5])
@pytest.mark.parametrize("limit", [2, 1, 1 - 2e-10])
def test_the_rounding_of_deltas_does_not_accumulate_over_microbatches(weight: float, limit: float) -> None:
    memory = {"forward": 0.5, "backward_input": 0.0, "backward_weight": weight, "limit": limit}
    plan = search(parse_problem({**DOCUMENT, "memory": memory}), SearchOptions("quick"))
    verify(plan)
    assert not exceeds(max(plan.metrics.peak_memory), limit, MEMORY_TOLERANCE)


@pytest.mark.parametrize(("cost", "amount"), [(1e-10, 2e12), (1e-90, 2e-10), (1e10, 2)])
def test_problems_with_tiny_and_huge_numbers_are_solved_to_optimality(cost: float, amount: float) -> None:
    document = {
        "pp_degree": 2,
        "microbatches": 3,
        "objective": "makespan",
        "costs": {
            "forward": [3 * cost, 2 * cost, 4 * cost, 3 * cost],
            "backward_input": [2 * cost, 3 * cost, 5 * cost, 2 * cost],
            "backward_weight": cost,
            "p2p": cost,
        },
        "memory": {
            "forward": amount,
            "backward_input": -amount / 2,
            "backward_weight": -amount / 2,
            "limit": 2.5 * amount,
        },
    }
    plan = search(parse_problem(document))
    assert plan.metrics.status == "optimal"
    assert plan.objective / cost == pytest.approx(73)


NUMBERS = ["9" * 5000, "1e999", "NaN", "-Infinity", "4e-320", "1e-101", "1e16"]


@pytest.mark.parametrize("text", NUMBERS)
@pytest.mark.parametrize(
    "document",
    [
        '{"pp_degree":2,"microbatches":3,"costs":{"forward":N,"backward_input":1,"backward_weight":1}}',
        '{"pp_degree":2,"microbatches":N,"costs":{"forward":1,"backward_input":1,"backward_weight":1}}',
        '{"pp_degree":2,"microbatches":3,"layers":[{"name":"a","repeat":4,"forward":1,'
        '"backward_input":N,"backward_weight":1}]}',
        '{"pp_degree":2,"microbatches":3,"layers":[{"name":"a","repeat":N}]}',
    ],
)
def test_numbers_out_of_range_are_refused(document: str, text: str) -> None:
    with pytest.raises(InvalidInput, match="found"):
        parse_any_problem(decode_json(document.replace("N", text, 1)))


@pytest.mark.parametrize(
    "memory",
    [
        {"forward": 1, "backward_input": -5e-324, "backward_weight": -1, "limit": 2.5},
        {"forward": 0, "backward_input": 5e-324, "backward_weight": -5e-324, "limit": 0},
    ],
)
def test_deltas_smaller_than_any_rounding_are_refused(
    memory: dict[str, float],
) -> None:
    with pytest.raises(InvalidInput, match=r"/memory/backward_input: found .*must be 0 or at least 1e-120"):
        parse_any_problem({**DOCUMENT, "memory": memory})


def test_numbers_too_long_to_print_are_reported() -> None:
    with pytest.raises(InvalidInput, match="/microbatches: found a number too long to print"):
        parse_any_problem({**DOCUMENT, "microbatches": 10**5000})
    layer = {"name": "a", "repeat": 10**5000, "forward": 1, "backward_input": 1, "backward_weight": 1}
    with pytest.raises(InvalidInput, match="/layers/0/repeat: found a number too long"):
        parse_any_problem({"pp_degree": 2, "microbatches": 3, "layers": [layer]})


def test_minus_zero_is_zero() -> None:
    minus = decode_json(
        '{"pp_degree":1,"microbatches":2,"costs":{"forward":-0.0,"backward_input":1,"backward_weight":-0.0}}'
    )
    plus = decode_json(
        '{"pp_degree":1,"microbatches":2,"costs":{"forward":0,"backward_input":1,"backward_weight":0}}'
    )
    assert parse_problem(minus) == parse_problem(plus)
    assert problem_json(parse_problem(minus)) == problem_json(parse_problem(plus))
