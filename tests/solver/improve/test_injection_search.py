"""Injections: their orders are valid at any limit, repeat themselves, and find what lists do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, limited_problems, rough_problems, uniform
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.dispatch import ListScheduler
from zbv_solver.construct.rules import Rule, injection, no_delay
from zbv_solver.improve.injection_search import injection_search, smoothed
from zbv_solver.problem.problem import F, Problem, W
from zbv_solver.timing.start_times import earliest_start_values
from zbv_solver.verify.verifier import verify_orders

KINDS = ("v", "loop", "single")


def random_injection(problem: Problem, random: np.random.Generator) -> Rule:
    unit = float(problem.arrays.duration.mean()) + 1e-6
    time = np.cumsum(random.exponential(unit, problem.microbatches))
    delay = random.normal(0, unit, no_delay(problem).shape)
    return injection(problem, random.permutation(problem.microbatches), time, delay)


@given(
    st.one_of(limited_problems(max_p=4, max_m=6, kinds=KINDS), differing_problems()), st.integers(0, 2**31)
)
def test_every_injection_gives_a_valid_order(problem: Problem, seed: int) -> None:
    scheduler, rule = ListScheduler(problem), random_injection(problem, np.random.default_rng(seed))
    attempt = scheduler.attempt(rule, "injection")
    assert attempt is not None
    verify_orders(problem, attempt.orders)
    value = scheduler.value(rule)
    assert attempt.value <= value * (1 + 1e-9)
    # An order is abandoned only if it is certainly worse.
    assert scheduler.value(rule, value * (1 + 1e-9)) == value
    assert scheduler.value(rule, value * 0.5) in (value, float("inf"))


@given(limited_problems(max_p=3, max_m=5, kinds=KINDS), st.integers(0, 2**31))
def test_no_microbatch_enters_before_its_time(problem: Problem, seed: int) -> None:
    scheduler, rule = ListScheduler(problem), random_injection(problem, np.random.default_rng(seed))
    scheduler.value(rule)
    begin = scheduler.board.end[0] - scheduler.tables.duration[scheduler.tables.host[0], F, 0]
    assert (begin >= rule.time * (1 - 1e-12) - 1e-12).all()


def test_a_rank_idles_for_an_action_that_other_actions_are_delayed_for() -> None:
    """With W's delayed by far, every W comes after all F's and I's of its rank."""
    problem = uniform(4, 8)
    delay = no_delay(problem)
    delay[:, 4:] = 1e9
    attempt = ListScheduler(problem).attempt(
        injection(problem, np.arange(8), np.zeros(8), delay), "injection"
    )
    assert attempt is not None
    for rank in range(4):
        letters = attempt.code[rank, : attempt.length[rank]] & 3
        assert (letters[-16:] == W).all()


def test_a_microbatch_that_completes_makes_room_for_one_more_only() -> None:
    """Rank 1 holds 1 on its outer chunk and 2 on the inner one; two more on the outer one block it."""
    problem = uniform(4, 3, limit=3)
    held = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0]
    memory = replace(
        problem.memory,
        forward=tuple(held),
        backward_input=tuple(-each for each in held),
        backward_weight=(0.0,) * 8,
    )
    scheduler = ListScheduler(replace(problem, memory=memory))
    for seed in range(20):
        random = np.random.default_rng(seed)
        time, delay = np.cumsum(random.exponential(1.0, 3)), random.normal(0, 9, (4, 6))
        attempt = scheduler.attempt(injection(problem, np.arange(3), time, delay), "injection")
        assert attempt is not None
        verify_orders(scheduler.problem, attempt.orders)


@given(st.one_of(limited_problems(max_p=3, max_m=5, kinds=KINDS), rough_problems(max_p=3, max_m=5)))
@settings(max_examples=30)
def test_attempts_are_valid_and_timed_with_the_real_costs(problem: Problem) -> None:
    for attempt in injection_search(problem, 400 * problem.max_actions):
        if attempt is not None:
            verify_orders(problem, attempt.orders)
            makespan, span = earliest_start_values(problem, attempt.orders)
            assert attempt.value == (span if problem.objective == "span" else makespan)


def test_a_seed_repeats_its_orders() -> None:
    problem = uniform(4, 12, limit=4, p2p=1)
    runs = [[a for a in injection_search(problem, 60_000, seed) if a is not None] for seed in (1, 1, 2)]
    assert [attempt.orders for attempt in runs[0]] == [attempt.orders for attempt in runs[1]]
    assert [attempt.orders for attempt in runs[0]] != [attempt.orders for attempt in runs[2]]


def test_equal_stages_at_tight_memory() -> None:
    """Eight ranks, 32 microbatches, 0.4 of 1F1B's memory: list scheduling and greedy orders reach 248."""
    problem = uniform(8, 32, limit=6.4)
    values = [a.value for a in injection_search(problem, 4 * 2_000 * problem.max_actions) if a is not None]
    assert min(values) <= 239


@pytest.mark.parametrize(("share", "ratio"), [(0.4, 1.02), (0.35, 1.15)])
def test_the_smallest_budget_tries_several_even_injections(share: float, ratio: float) -> None:
    """So large problems, for which quick searches place few actions, still get an order that keeps pace.

    At 0.35, microbatches must enter more slowly than the load of the ranks would allow.
    """
    problem = uniform(32, 256, limit=share * 64)
    (attempt,) = [a for a in injection_search(problem, 1) if a is not None]
    assert attempt.value <= ratio * lower_bound(problem).value


def test_costs_are_smoothed_towards_their_mean() -> None:
    problem = uniform(1, 3)
    uneven = replace(problem, costs=replace(problem.costs, forward=(1.0, 3.0)))
    assert smoothed(uneven, 0.25).costs.forward == (1.75, 2.25)
    assert smoothed(uneven, 1.0) == uneven
