"""Timing: the published vectors, and the definitions against slow references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.problems import problems, uniform
from support.reference import makespan, peak_memory, simulate, steady_period
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.list_scheduling import priority_schedules
from zbv_solver.errors import InvalidPlan
from zbv_solver.orders import Orders
from zbv_solver.problem import Problem
from zbv_solver.schema import parse_problem
from zbv_solver.timing import earliest_start_span, evaluate, memory_profile, span_start_times

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_published_vectors(vector: dict[str, Any]) -> None:
    problem, orders = parse_problem(vector["problem"]), Orders.from_text(vector["ranks"])
    timing, expected = evaluate(problem, orders), vector["expect"]
    assert timing.makespan == pytest.approx(expected["makespan"], rel=1e-12)
    assert timing.span == pytest.approx(expected["span"], rel=1e-12)
    assert timing.bubble_rate == pytest.approx(expected["bubble_rate"], abs=1e-12)
    assert list(timing.peak_memory) == pytest.approx(expected["peak_memory"], rel=1e-12)
    assert earliest_start_span(problem, orders) == pytest.approx(expected["earliest_start_span"], rel=1e-12)


@given(problems(max_p=4, max_m=4))
def test_times_and_memory_equal_a_plain_simulation(problem: Problem) -> None:
    orders = some_orders(problem)
    timing, times = evaluate(problem, orders), simulate(problem, orders)[0]
    for rank in range(problem.pp_degree):
        part = orders.slice_of(rank)
        for action, start, end in zip(
            orders.actions(rank), timing.start[part], timing.end[part], strict=True
        ):
            assert times[action] == (start, end)
    assert timing.makespan == makespan(problem, orders)
    assert list(timing.peak_memory) == pytest.approx(peak_memory(problem, orders))


@given(problems(max_p=4, max_m=3))
def test_span_is_the_period_of_iterations_that_follow_each_other(problem: Problem) -> None:
    """The definition, acted out: unrolled iterations settle at one span each.

    Where ranks pass a critical cycle of length k round, the period shows over multiples of k; 60 and its
    half are multiples of all cycle lengths possible here (1 to 4, with 30 to spare).
    """
    orders = some_orders(problem)
    assert evaluate(problem, orders).span == pytest.approx(steady_period(problem, orders, 120), rel=1e-9)


@given(problems(max_p=4, max_m=4))
def test_span_start_times_fit_every_window(problem: Problem) -> None:
    orders = some_orders(problem)
    span = evaluate(problem, orders).span
    start = span_start_times(problem, orders)
    end = start + problem.arrays.duration[orders.letter, orders.stage]
    first, last = orders.offset[:-1], orders.offset[1:] - 1
    assert np.all(end[last] - start[first] <= span * (1 + 1e-9) + 1e-9)
    assert np.all(start >= evaluate(problem, orders).start - 1e-9)


@given(problems(max_p=4, max_m=4))
def test_spans_are_ordered(problem: Problem) -> None:
    orders = some_orders(problem)
    timing = evaluate(problem, orders)
    busiest = max(
        problem.arrays.duration[orders.letter, orders.stage][orders.slice_of(rank)].sum()
        for rank in range(problem.pp_degree)
    )
    assert busiest <= timing.span * (1 + 1e-12) <= earliest_start_span(problem, orders) * (1 + 2e-12)
    assert timing.span <= timing.makespan * (1 + 1e-12)


def test_memory_profile_counts_growth_while_an_action_runs() -> None:
    problem = uniform(1, 1)
    orders = Orders.from_text([["0F0", "1F0", "1I0", "1W0", "0B0"]])
    during, after = memory_profile(problem, orders)
    assert during.tolist() == [1, 2, 2, 1.5, 1]
    assert after.tolist() == [1, 2, 1.5, 1, 0]


def test_a_deadlock_is_named_by_rank_and_action() -> None:
    ranks = [["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "2B0", "1B0"]]
    with pytest.raises(InvalidPlan, match=r"deadlocks.*rank 0 at 3F0.*rank 1 at 2F0"):
        evaluate(uniform(2, 1), Orders.from_text(ranks))


def some_orders(problem: Problem) -> Orders:
    """An order that is valid but not everywhere good."""
    attempts = [*get_v_schedule(problem), *priority_schedules(problem, (0.5,))]
    return attempts[len(attempts) // 2].orders
