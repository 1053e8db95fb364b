"""Constructors: zero bubble where it is possible, a valid order wherever one exists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, limited_problems, uniform, with_sizes
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.overtaking import Large, OvertakingRule, OvertakingScheduler
from zbv_solver.construct.rules import EntryRule, entry_rule, first_rule
from zbv_solver.improve.overtaking_search import only
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import earliest_start_values, evaluate
from zbv_solver.verify.verifier import verify_orders


@pytest.mark.parametrize(
    ("p", "m"), [(1, 1), (1, 5), (2, 4), (4, 8), (4, 32), (8, 16), (8, 32), (16, 32), (16, 64), (32, 64)]
)
def test_greedy_v_has_no_bubble_at_the_memory_of_1f1b(p: int, m: int) -> None:
    """Uniform costs, no transfers, m >= 2p: the span is the work of one rank (Qi et al. 2024)."""
    problem = uniform(p, m, limit=2 * p)
    best = min(attempt.span for attempt in get_v_schedule(problem))
    assert best == 6 * m


@given(limited_problems(max_p=5, max_m=8, kinds=("v", "loop", "single")))
def test_every_attempt_is_valid_and_states_its_value(problem: Problem) -> None:
    """Lists never get stuck: the admission of forwards keeps a way out at every feasible limit."""
    lists, greedy = list(priority_schedules(problem, (1.0, 0.5))), get_v_schedule(problem)
    assert len(lists) in (12, 36)
    for attempt in [serial(problem), *lists, *(greedy if problem.placement.kind == "v" else ())]:
        verify_orders(problem, attempt.orders)
        timing = evaluate(problem, attempt.orders)
        assert attempt.makespan == pytest.approx(timing.makespan)
        assert attempt.span >= timing.span * (1 - 1e-12)


@given(differing_problems())
@settings(max_examples=40)
def test_a_rank_with_memory_for_all_microbatches_needs_no_look_at_those_in_flight(problem: Problem) -> None:
    scheduler, rule = ListScheduler(problem), first_rule(problem)
    value, code = scheduler.value(rule), scheduler.board.code.copy()
    scheduler.tables = scheduler.tables._replace(is_ample=np.zeros(problem.pp_degree, np.bool_))
    assert scheduler.value(rule) == value
    assert (scheduler.board.code == code).all()


def test_small_microbatches_do_not_delay_a_large_one_that_they_defer_to() -> None:
    problem = with_sizes(uniform(8, 1), [0.0] * 12 + [19.0] + [0.0] * 11)
    path = 20.0 * 2 * problem.n_stages
    for defer, waits in ((math.inf, True), (2.0, False)):
        rule = entry_rule(problem, EntryRule("forward-deep", 0.5, 2.0, 1.0, 1.0, defer))
        attempt = ListScheduler(problem).attempt(rule, "list")
        assert attempt is not None
        orders, timing = attempt.orders, evaluate(problem, attempt.orders)
        large = (orders.microbatch == 12) & (orders.letter != W)
        took = timing.end[large].max() - timing.start[large].min()
        assert (took > path) == waits


def test_cheap_fused_backwards_are_used() -> None:
    problem = uniform(2, 6)
    cheap = replace(problem, costs=replace(problem.costs, backward=(1.0,) * 4))
    fused, split = (min(attempt.span for attempt in get_v_schedule(each)) for each in (cheap, problem))
    assert fused < split


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
        assert not scheduler.tables.is_ample.all() or (problem.arrays.delta[I] > 0).any()
        return
    orders = scheduler.orders()
    verify_orders(problem, orders)
    makespan, span = earliest_start_values(problem, orders)
    assert value == pytest.approx(span if problem.objective == "span" else makespan)


def test_small_microbatches_overtake_while_the_large_one_is_on_its_way() -> None:
    """Without slack, all enter after it, do not delay it, and return before it."""
    costs: Any = {name: {"size": 1} for name in ("forward", "backward_input", "backward_weight")}
    document = {"pp_degree": 8, "microbatches": 21, "features": {"size": [20] + [1] * 20}}
    problem = parse_problem({**document, "costs": costs | {"p2p": {"size": 0.5}}})
    scheduler, path = around(problem, [0]), 20 * 2 * 16 + 10 * 4 * 7
    assert scheduler.value(rule(problem, slack=0.0, patience=0.0, deadline=float(path))) == path + 20
    board = scheduler.board
    code, microbatch = (row[0, : board.length[0]].copy() for row in (board.code, board.microbatch))
    assert microbatch[code == F][0] == 0
    assert microbatch[code == I][-1] == 0
    assert scheduler.value(rule(problem, slack=1.0)) < np.inf
    assert board.microbatch[0, 0] != 0
