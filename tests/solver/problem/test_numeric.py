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
    broken_rule,
    clean_deltas,
    first_broken,
    integer_scale,
)
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Memory
from zbv_solver.search.assemble import in_search_unit
from zbv_solver.verify.verifier import verify_orders

MANY = 1 << 40


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
def test_the_first_number_that_breaks_a_rule(values: list[float], signed: bool) -> None:
    rules = ((index, broken_rule(value, signed)) for index, value in enumerate(values))
    assert first_broken(values, signed) == next((broken for broken in rules if broken[1]), None)


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
