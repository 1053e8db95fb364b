"""The search with overtaking: when it pays, and that it gains where one microbatch decides."""

from __future__ import annotations

import numpy as np
from support.problems import uniform, with_sizes
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.construct.tables import sizes
from zbv_solver.improve.overtaking_search import large_ones, only, overtaking_search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

ONE_LARGE = with_sizes(uniform(8, 1), [0.0] * 5 + [29.0] + [0.0] * 24)


def test_large_ones_are_those_before_the_largest_step_in_size() -> None:
    problem = with_sizes(uniform(16, 1), [0.0, 30.0, 0.1, 28.0, 0.0, 0.2, 0.0, 0.0])
    assert large_ones(problem).tolist() == [1, 3]


def test_no_microbatch_is_large_where_the_work_of_a_rank_decides() -> None:
    assert len(large_ones(uniform(4, 8))) == 0
    assert len(large_ones(with_sizes(uniform(2, 1), [1.0] + [0.0] * 30))) == 0
    assert len(large_ones(with_sizes(uniform(16, 1), [1.2, 1.1, 1.0, 0.9]))) == 0


def test_a_part_has_the_costs_of_its_microbatches() -> None:
    alone = only(ONE_LARGE, np.array([5]))
    assert sizes(alone).tolist() == [sizes(ONE_LARGE)[5]]


def test_orders_get_better_and_are_better_than_those_in_one_order_of_entry() -> None:
    found = [each for each in overtaking_search(ONE_LARGE, 300 * ONE_LARGE.max_actions, seed=1) if each]
    values = [value for value, _ in found]
    assert values == sorted(values, reverse=True)
    for value, orders in found:
        verify_orders(ONE_LARGE, orders)
        assert objective_of(ONE_LARGE, orders) <= value * (1 + 1e-9)
    listed = min(attempt.value for attempt in priority_schedules(ONE_LARGE))
    assert values[-1] < listed
