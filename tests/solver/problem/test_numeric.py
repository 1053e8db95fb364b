"""Rounding: common units of costs, sums that are zero, and tolerances that do not depend on the unit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.problems import decades, rough_problems, uniform
from zbv_solver.errors import InfeasibleMemory, InvalidPlan
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
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Memory
from zbv_solver.problem.writing import problem_json
from zbv_solver.search.assemble import in_search_unit
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.verify.verifier import verify, verify_orders

MANY = 1 << 40
ONES = {"forward": 1, "backward_input": 1, "backward_weight": 1}


@pytest.mark.parametrize(
    ("values", "integers"),
    [
        ([0.5, 0.25], [2, 1]),
        ([0.1, 0.2, 0.3, 0.1 + 0.2], [1, 2, 3, 3]),
        ([1 / 3, 2 / 3, 1, 0], [1, 2, 3, 0]),
        ([123.456, 1000.001, 77.123456], [15_432_000, 125_000_125, 9_640_432]),
        ([1e12, 1], [10**12, 1]),
        ([0.0, 0.0], [0, 0]),
        ([], []),
        ([1e15, 1.0], None),
        ([math.pi, math.e, math.sqrt(2), math.sqrt(3)], None),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 2.0**-70, 2.0**60])
def test_costs_with_a_common_unit_become_integers(
    values: list[float], integers: list[int] | None, factor: float
) -> None:
    scale = integer_scale([value * factor for value in values], MANY)
    if integers is None:
        assert scale is None
    else:
        assert scale is not None
        assert [value * factor * scale for value in values] == pytest.approx(integers, rel=1e-12)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=12), decades(1e-90, 1e10))
def test_the_integers_do_not_depend_on_the_unit(values: list[int], unit: float) -> None:
    scale = integer_scale([value * unit for value in values], MANY)
    assert scale is not None
    divisor = math.gcd(*values)
    assert [round(value * unit * scale) for value in values] == [value // divisor for value in values]


@given(rough_problems())
def test_costs_in_the_search_s_unit_equal_the_caller_s_costs(problem: Problem) -> None:
    own, unit = in_search_unit(problem)
    theirs = problem.arrays.duration
    assert own.arrays.duration * unit == pytest.approx(theirs, rel=1e-10, abs=float(theirs.max()) * 1e-90)


@example([1.0, math.nan], False)
@given(st.lists(st.floats() | st.integers(-3, 3).map(float), max_size=5), st.booleans())
def test_numbers_are_valid_together_if_each_of_them_is(values: list[float], signed: bool) -> None:
    is_wrong = any(broken_rule(value, signed) is not None for value in values)
    assert are_numbers(values, signed) == (not is_wrong and 0.0 not in values)


@given(decades(1e-100, 1e15), st.floats(-1.5, 1.5))
def test_clean_deltas_sum_to_zero_and_are_a_fixed_point(forward: float, share: float) -> None:
    held = np.array([forward])
    inputs, weights = clean_deltas(held, share * held)
    assert held + inputs + weights == 0
    assert weights <= 0
    assert clean_deltas(held, inputs) == (inputs, weights)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_feasibility_and_the_verifier_tolerate_the_same_share_in_every_unit(unit: float) -> None:
    """With an absolute tolerance, tiny limits would not hold, and large ones would refuse rounding."""
    problem, orders = uniform(1, 1), Orders.from_text([["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]])

    def below_the_need(share: float) -> Problem:
        half = (-unit / 2, -unit / 2)
        memory = Memory((unit, unit), half, half, static=(0.0,), limit=(2 * unit * (1 - share),))
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
    problem = parse_problem({"pp_degree": 1, "microbatches": 1, "costs": ONES, "memory": deltas})
    assert problem_json(problem)["memory"]["backward_weight"] == [-0.2, -0.2]
    assert problem.arrays.delta[2, :, 0].tolist() == [-(0.3 - 0.1)] * 2


@pytest.mark.parametrize("weight", [-0.4999999995, -0.5000000005])
def test_the_rounding_of_deltas_does_not_accumulate_over_microbatches(weight: float) -> None:
    memory = {"forward": 0.5, "backward_input": 0.0, "backward_weight": weight, "limit": 1}
    document = {"pp_degree": 1, "microbatches": 100, "costs": ONES, "memory": memory}
    plan = search(parse_problem(document), SearchOptions("quick"))
    verify(plan)
    assert not exceeds(max(plan.metrics.peak_memory), 1)
