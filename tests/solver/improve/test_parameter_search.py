"""The parameter search: valid, ever better, repeatable, and worth its time where memory is tight."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import limited, limited_problems, uniform, uniform_document
from zbv_solver.construct.attempt import Attempt
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules
from zbv_solver.construct.greedy_v import GREEDY_COST
from zbv_solver.construct.rules import simple_rule
from zbv_solver.improve.parameter_search import FEW_MICROBATCHES, parameter_search
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.verify.verifier import verify_orders

TIGHT = limited(uniform(4, 12, p2p=1), 2.0)


def improvements(problem: Problem, evaluations: int, seed: int = 0) -> list[Attempt]:
    found = parameter_search(problem, evaluations * problem.max_actions, seed)
    return [attempt for attempt in found if attempt is not None]


@given(limited_problems(max_p=4, max_m=6, kinds=("v", "loop", "single")))
@settings(max_examples=30)
def test_attempts_are_valid_and_each_better_than_the_last(problem: Problem) -> None:
    attempts = improvements(problem, 40)
    assert all(later.value < earlier.value for earlier, later in pairwise(attempts))
    for attempt in attempts:
        verify_orders(problem, attempt.orders)


def test_the_seed_decides_everything() -> None:
    looped = limited(parse_problem({**uniform_document(4, 12, p2p=1), "placement": "loop"}), 2.0)
    first, again, other = (improvements(looped, 80, seed) for seed in (1, 1, 2))
    assert [(a.method, a.value) for a in first] == [(a.method, a.value) for a in again]
    assert all(mine.orders == theirs.orders for mine, theirs in zip(first, again, strict=True))
    assert [(a.method, a.value) for a in first] != [(a.method, a.value) for a in other]


def test_beats_the_fixed_rules_where_memory_is_tight() -> None:
    fixed = min(attempt.value for attempt in priority_schedules(TIGHT))
    assert improvements(TIGHT, 300)[-1].value < 0.95 * fixed


def test_the_budget_counts_placed_actions() -> None:
    """Orders given up early cost less, so there may be more of them than the budget has whole orders; fewer
    only by what the greedy costs more."""
    for orders in (0, 7, 50):
        made = len(list(parameter_search(uniform(1, 2), orders * 12)))
        assert (made == 0) if orders == 0 else (orders / GREEDY_COST <= made <= 12 * orders)


@given(limited_problems(max_p=4, max_m=6, kinds=("v", "loop", "single")), st.sampled_from([0.9, 1.0, 1.2]))
@settings(max_examples=50)
def test_giving_up_early_loses_no_better_order(problem: Problem, share: float) -> None:
    """An order is either laid whole, with the value that it has anyway, or is worse than the bar."""
    scheduler = ListScheduler(problem)
    for preference in ("backward-deep", "forward-deep"):
        rule = simple_rule(problem, preference, 0.75, 0.5)
        value = scheduler.value(rule)
        cut = scheduler.value(rule, most=share * value)
        assert cut == value or (cut == float("inf") and value > share * value)


def test_many_microbatches_are_tuned_at_few() -> None:
    """At 40 times the microbatches a budget of 60 orders at few still finds better than the fixed rules."""
    few = uniform(4, FEW_MICROBATCHES * 4, p2p=1)
    problem = limited(replace(few, microbatches=640), 3.0)
    found = improvements(problem, 8)
    assert found
    for attempt in found:
        verify_orders(problem, attempt.orders)
    assert "tuned_at=16" in found[-1].method


def test_a_set_flag_ends_an_evaluation() -> None:
    halt = np.ones(1, np.uint8)
    problem = limited(uniform(4, 512, p2p=1), 2.0)
    rule = simple_rule(problem, "backward-deep", 1.0, 0.5)
    assert ListScheduler(problem, halt=halt).attempt(rule, "") is None
