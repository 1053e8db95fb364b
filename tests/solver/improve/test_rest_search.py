"""Laying the rest of an order again: what is kept stays, orders stay valid and get better."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import limited_problems, uniform
from zbv_solver.construct.attempt import Attempt, from_orders
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.rules import simple_rule
from zbv_solver.improve.parameter_search import RuleClimber
from zbv_solver.improve.rest_search import RestClimber, rest_search
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import earliest_times
from zbv_solver.verify.verifier import verify_orders


@given(limited_problems(max_p=4, max_m=6, kinds=("v", "loop", "single")), st.floats(0, 1))
def test_what_starts_before_the_cut_is_kept(problem: Problem, share: float) -> None:
    start = next(priority_schedules(problem))
    begins, _ = earliest_times(problem, start.orders)
    ranks = range(problem.pp_degree)
    cut = share * start.makespan
    kept = np.array([int(np.searchsorted(begins[start.orders.slice_of(rank)], cut)) for rank in ranks])
    scheduler = ListScheduler(problem)
    rule = simple_rule(problem, "forward-deep", 1.0, 0.0)
    assert scheduler.value(rule, kept=(start.code, kept)) < np.inf
    attempt = Attempt.of("again", problem, scheduler.tables, scheduler.board)
    for rank in ranks:
        assert np.array_equal(attempt.code[rank, : kept[rank]], start.code[rank, : kept[rank]])
    verify_orders(problem, attempt.orders)


@given(limited_problems(max_p=4, max_m=6, kinds=("v", "loop", "single")))
@settings(max_examples=30)
def test_attempts_are_valid_and_each_better_than_the_last(problem: Problem) -> None:
    start = serial(problem)
    found = list(rest_search(problem, start.orders, 40 * problem.max_actions))
    better = [attempt for attempt in found if attempt is not None]
    values = [start.value, *(attempt.value for attempt in better)]
    assert all(later < earlier for earlier, later in pairwise(values))
    for attempt in better:
        verify_orders(problem, attempt.orders)


def test_improves_an_order_and_repeats_itself() -> None:
    problem = uniform(4, 12, limit=6, p2p=1)
    start = serial(problem).orders
    runs = [[a for a in rest_search(problem, start, 40_000, seed) if a is not None] for seed in (1, 1, 2)]
    assert [a.value for a in runs[0]] == [a.value for a in runs[1]] != [a.value for a in runs[2]]
    assert runs[0][-1].orders == runs[1][-1].orders
    code, length, _ = from_orders(runs[0][-1].orders, problem)
    assert np.array_equal(code, runs[0][-1].code)
    assert np.array_equal(length, runs[0][-1].length)


def test_the_order_remembers_which_rule_laid_which_stretch() -> None:
    """Laid again from the last cut on by the rule of that cut, the order is as good."""
    problem = uniform(4, 12, limit=6, p2p=1)
    scheduler = ListScheduler(problem)
    rule = simple_rule(problem, "backward-deep", 1.0, 0.5)
    first = scheduler.attempt(rule, "first")
    assert first is not None
    assert first.rule is rule
    climber = RestClimber(RuleClimber(problem, seed=0), first.orders, first.rule)
    improvements = sum(climber.step() for _ in range(400))
    assert improvements > 0
    cuts = [cut for cut, _ in climber.laid]
    assert cuts == sorted(cuts)
    assert cuts[0] == 0.0
    cut, last = climber.laid[-1]
    begins, _ = earliest_times(problem, climber.found.orders)
    ranks = range(problem.pp_degree)
    kept = np.array([np.searchsorted(begins[climber.found.orders.slice_of(rank)], cut) for rank in ranks])
    assert last is not None
    assert scheduler.value(last, kept=(climber.found.code, kept)) == climber.best < first.value
