"""Orders around those of large microbatches: valid, with the value that they state; small ones overtake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, uniform, with_sizes
from zbv_solver.construct.dispatch import serial
from zbv_solver.construct.overtaking import Large, OvertakingRule, OvertakingScheduler
from zbv_solver.improve.overtaking_search import only
from zbv_solver.problem.problem import F, I, Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import earliest_start_values
from zbv_solver.verify.verifier import verify_orders


def around(problem: Problem, chosen: list[int]) -> OvertakingScheduler:
    """A scheduler around the chosen microbatches, which run one after another."""
    large = np.array(chosen)
    alone = only(problem, large)
    return OvertakingScheduler(problem, Large.of(problem, large, alone, serial(alone).orders))


def rule(problem: Problem, **changes: Any) -> OvertakingRule:
    m, chunks = problem.microbatches, problem.placement.chunks
    usual = OvertakingRule(1000.0, 0.2, np.arange(m, dtype=np.float64), np.zeros(4 * chunks), m, 0.5, True)
    return usual._replace(**changes)


@given(
    differing_problems(),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0, 50.0, 1e9]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1, 2, 100]),
    st.booleans(),
)
@settings(max_examples=80)
def test_complete_orders_are_valid_and_state_their_value(
    problem: Problem, which: int, deadline: float, slack: float, cap: int, by_arrival: bool
) -> None:
    scheduler = around(problem, [which % problem.microbatches])
    value = scheduler.value(
        rule(problem, deadline=deadline, slack=slack, cap=cap, by_arrival=by_arrival, patience=slack)
    )
    if value == np.inf:  # what a microbatch may need on a rank does not fit
        assert np.isfinite(problem.arrays.limit).any()
        return
    orders = scheduler.orders()
    verify_orders(problem, orders)
    makespan, span = earliest_start_values(problem, orders)
    assert value == pytest.approx(span if problem.objective == "span" else makespan)


@given(differing_problems(), st.integers(0, 4))
@settings(max_examples=30)
def test_nothing_blocks_where_memory_is_ample(problem: Problem, which: int) -> None:
    scheduler = around(problem, [which % problem.microbatches])
    if scheduler.tables.is_ample.all() and (problem.arrays.delta[I] <= 0).all():
        assert scheduler.value(rule(problem)) < np.inf


def test_small_microbatches_overtake_while_the_large_one_is_on_its_way() -> None:
    """All enter after it, do not delay it, and return before it."""
    costs = {name: {"size": 1} for name in ("forward", "backward_input", "backward_weight")}
    problem = parse_problem(
        {
            "pp_degree": 8,
            "microbatches": 21,
            "features": {"size": [20] + [1] * 20},
            "costs": costs | {"p2p": {"size": 0.5}},
        }
    )
    scheduler = around(problem, [0])
    path = 20 * 2 * 16 + 10 * 4 * 7
    assert scheduler.value(rule(problem, slack=0.0, patience=0.0, deadline=float(path))) == path + 20
    board = scheduler.board
    code, microbatch = (row[0, : board.length[0]] for row in (board.code, board.microbatch))
    assert microbatch[code == F][0] == 0
    assert microbatch[code == I][-1] == 0


def test_slack_lets_small_microbatches_enter_before_a_large_one() -> None:
    problem = with_sizes(uniform(4, 1), [9.0] + [0.0] * 4)
    scheduler = around(problem, [0])
    first = []
    for slack in (0.0, 1.0):
        assert scheduler.value(rule(problem, slack=slack)) < np.inf
        first.append(int(scheduler.board.microbatch[0, 0]))
    assert first[0] == 0
    assert first[1] != 0
