"""Windows: a whole order as one window reaches its optimum, a part stays within its bounds."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.problems import limited_problems, uniform
from zbv_solver.construct.list_scheduling import priority_schedules, serial
from zbv_solver.improve.exact import objective_of, refine
from zbv_solver.improve.windows import refine_window, sweep_windows
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, Problem
from zbv_solver.timing.start_times import earliest_times, span_start_times
from zbv_solver.verify.verifier import verify_orders


def starts(problem: Problem, orders: Orders) -> list[float]:
    if problem.objective == "span":
        return list(span_start_times(problem, orders).tolist())
    return list(earliest_times(problem, orders)[0].tolist())


@given(limited_problems(max_p=2, max_m=3, objective="makespan", fused=False))
@settings(max_examples=40)
def test_a_window_over_everything_reaches_the_optimum(problem: Problem) -> None:
    """Letters stay as they are, so this holds from a split order where fusing does not pay."""
    start = next(priority_schedules(problem)).orders
    assume(not (start.letter == B).any())
    best = refine(problem, start, lower_bound=0.0, effort=5.0)
    assume(best.orders is None or not (best.orders.letter == B).any())
    found = refine_window(problem, start, 0.0, float("inf"), effort=5.0)
    assert objective_of(problem, found or start) == pytest.approx(best.lower_bound)


@given(limited_problems(max_p=3, max_m=5), st.floats(0, 0.8), st.floats(0.2, 1))
@settings(max_examples=80)
def test_only_the_window_changes_and_only_for_the_better(problem: Problem, at: float, share: float) -> None:
    orders = serial(problem).orders
    value = objective_of(problem, orders)
    begin, end = at * value, (at + share) * value
    found = refine_window(problem, orders, begin, end, effort=0.2)
    if found is None:
        return
    verify_orders(problem, found)
    assert objective_of(problem, found) < value
    times = starts(problem, orders)
    for rank in range(problem.pp_degree):
        for position, (before, after) in enumerate(
            zip(orders.actions(rank), found.actions(rank), strict=True)
        ):
            time = times[orders.slice_of(rank).start + position]
            if time < begin - 1e-6 * value or time > end + 1e-6 * value:
                assert before == after


@given(limited_problems(max_p=3, max_m=5))
@settings(max_examples=20)
def test_sweeps_repeat_themselves(problem: Problem) -> None:
    orders = serial(problem).orders
    found = [sweep_windows(problem, orders, effort=0.5, window_effort=0.1, actions=20) for _ in range(2)]
    assert found[0] == found[1]
    if found[0] is not None:
        verify_orders(problem, found[0])
        assert objective_of(problem, found[0]) < objective_of(problem, orders)


def test_nothing_is_free_outside_the_order() -> None:
    problem = uniform(2, 2)
    assert refine_window(problem, serial(problem).orders, 1e6, 2e6, effort=1.0) is None
