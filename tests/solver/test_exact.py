"""CP-SAT: proves small cases, agrees with exhaustive search, repeats itself, can be stopped."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from support.problems import limited, limited_problems, problems, uniform
from support.reference import all_orders_of_one_microbatch
from zbv_solver.construct.list_scheduling import priority_schedules, serial
from zbv_solver.improve.exact import refine
from zbv_solver.improve.exact_model import integer_scale
from zbv_solver.problem import Costs, Problem
from zbv_solver.timing import evaluate
from zbv_solver.verify import verify_orders


def value_of(problem: Problem, orders: object) -> float:
    timing = evaluate(problem, orders)  # type: ignore[arg-type]  # Orders
    return timing.span if problem.objective == "span" else timing.makespan


@given(problems(max_p=3, max_m=1))
@settings(max_examples=40)
def test_proves_the_optimum_of_exhaustive_search(problem: Problem) -> None:
    best = min(value_of(problem, orders) for orders in all_orders_of_one_microbatch(problem))
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.proved
    assert value_of(problem, result.orders or start) == pytest.approx(best)
    assert result.lower_bound == pytest.approx(best)


@given(limited_problems(max_p=3, max_m=3))
@settings(max_examples=30)
def test_orders_found_are_valid_and_never_worse(problem: Problem) -> None:
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.3)
    if result.orders is not None:
        verify_orders(problem, result.orders)
        assert value_of(problem, result.orders) <= value_of(problem, start) * (1 + 1e-9) + 1e-9
        assert result.lower_bound <= value_of(problem, result.orders) * (1 + 1e-9) + 1e-9


@given(limited_problems(max_p=2, max_m=3))
@settings(max_examples=15)
def test_repeats_itself(problem: Problem) -> None:
    start = next(priority_schedules(problem)).orders
    results = [refine(problem, start, lower_bound=0.0, effort=0.2, seed=7) for _ in range(2)]
    assert results[0].orders == results[1].orders
    assert results[0].lower_bound == results[1].lower_bound


def test_fractional_costs_keep_a_valid_bound() -> None:
    """Thirds fit no decimal grid: durations are rounded down, the bound with them."""
    third = 1 / 3
    plain = uniform(2, 3)
    problem = replace(
        plain,
        costs=Costs((third,) * 4, (2 * third,) * 4, (third,) * 4, (third / 7,) * 3),
        objective="makespan",
    )
    start = serial(problem).orders
    result = refine(problem, start, lower_bound=0.0, effort=5.0)
    assert result.orders is not None
    found = value_of(problem, result.orders)
    assert result.lower_bound <= found < value_of(problem, start)
    assert result.lower_bound == pytest.approx(found, rel=1e-4)


def test_stops_soon_after_cancellation() -> None:
    problem = limited(uniform(4, 12, p2p=1), 3.0)
    start = serial(problem).orders
    asked = time.monotonic()
    result = refine(
        problem, start, lower_bound=0.0, effort=1e6, cancelled=lambda: time.monotonic() - asked > 0.5
    )
    assert not result.proved  # an hour's effort was cut short, or this test would have timed out
    assert result.orders is None or value_of(problem, result.orders) <= value_of(problem, start)


@pytest.mark.parametrize(
    ("values", "scale"),
    [([], 1), ([0, 0], 1), ([2, 4], 0.5), ([1, 3], 1), ([0.5, 0.25], 4), ([1e15, 1], (1 << 20) / 1e15)],
)
def test_integer_scale(values: list[float], scale: float) -> None:
    assert integer_scale(values) == pytest.approx(scale)
