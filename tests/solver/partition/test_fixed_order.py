"""A fixed order as a function of its stages' costs: its value, its critical terms, and what it holds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems
from zbv_solver.partition.fixed_order import FixedOrder, largest_mean_cycle
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.timing.start_times import evaluate


@settings(max_examples=60)
@given(problems(kinds=("v", "loop", "single")), st.randoms(use_true_random=True), st.floats(0.1, 10))
def test_terms_are_exact_for_their_costs_and_bounds_for_others(
    problem: Problem, random: Random, factor: float
) -> None:
    orders = random_orders(problem, random)
    problem = replace(problem, memory=replace(problem.memory, limit=None))
    order = FixedOrder.of(problem, orders)
    timing = evaluate(problem, orders)
    value = objective_value(problem.objective, timing)
    duration, delta, latency = problem.arrays.of_equal()
    assert np.isclose(order.value(duration, latency), value, rtol=1e-9)
    terms = list(order.critical(duration, latency))
    assert np.isclose(terms[0].value(duration, latency), value, rtol=1e-9)
    assert max(each.value(duration, latency) for each in terms) <= value * (1 + 1e-9)
    paths = [order.path_of(rank, duration, latency) for rank in range(len(order.hosted))]
    assert {each.key for each in paths} <= {each.key for each in terms} or problem.objective == "makespan"
    assert max(each.value(duration, latency) for each in paths) <= value * (1 + 1e-9)
    # Other costs: every stage takes up to ten times as long, or as short.
    scale = factor ** np.linspace(-1, 1, duration.shape[1])
    other = order.value(duration * scale, latency)
    assert all(each.value(duration * scale, latency) <= other * (1 + 1e-9) for each in terms)
    held = np.array(problem.memory.static)
    for rank, numbers in zip(*order.held, strict=True):
        amounts = np.array([delta[0], delta[0] + delta[1]])[:, order.hosted[rank]]
        held[rank] = max(held[rank], problem.memory.static[rank] + float((numbers * amounts).sum()))
    assert np.allclose(held, timing.peak_memory, rtol=1e-9)


def test_the_largest_mean_cycle() -> None:
    """0 → 1 → 2 → 0 has the mean 5, and 0 → 1 → 0 has 4.5."""
    none = -np.inf
    weight = np.array([[1.0, 5.0, none], [4.0, 2.0, 9.0], [1.0, none, 4.4]])
    assert sorted(largest_mean_cycle(weight)) == [0, 1, 2]
    assert largest_mean_cycle(np.array([[3.0]])) == [0]
