"""Injections: their orders are valid at any limit, repeat themselves, and find what lists do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, limited_problems, rough_problems, uniform
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.injection import Injection, InjectionScheduler
from zbv_solver.construct.injection_state import accept
from zbv_solver.improve.injection_search import injection_search, smoothed
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import earliest_start_values
from zbv_solver.verify.verifier import verify_orders

KINDS = ("v", "loop", "single")


@given(
    st.one_of(limited_problems(max_p=4, max_m=6, kinds=KINDS), differing_problems()), st.integers(0, 2**31)
)
def test_every_injection_gives_a_valid_order(problem: Problem, seed: int) -> None:
    random = np.random.default_rng(seed)
    scheduler = InjectionScheduler(problem)
    unit = float(problem.arrays.duration.mean()) + 1e-6
    entry = np.cumsum(random.exponential(unit, problem.microbatches))
    delay = random.normal(0, unit, scheduler.no_delay().shape)
    attempt = scheduler.attempt(Injection(entry, delay), "injection")
    assert attempt is not None
    verify_orders(problem, attempt.orders)
    value = scheduler.value(Injection(entry, delay))
    assert attempt.value <= value * (1 + 1e-9)
    # An order is abandoned only if it is certainly worse.
    assert scheduler.value(Injection(entry, delay), value * (1 + 1e-9)) == value
    assert scheduler.value(Injection(entry, delay), value * 0.5) in (value, float("inf"))


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
    scheduler = InjectionScheduler(replace(problem, memory=memory))
    for seed in range(20):
        random = np.random.default_rng(seed)
        entry, delay = np.cumsum(random.exponential(1.0, 3)), random.normal(0, 9, (4, 6))
        attempt = scheduler.attempt(Injection(entry, delay), "injection")
        assert attempt is not None
        verify_orders(scheduler.problem, attempt.orders)


@given(limited_problems(max_p=4, max_m=8, kinds=KINDS), st.integers(0, 2**31), st.sampled_from([1, 2, 64]))
def test_a_mark_continues_as_an_evaluation_from_the_beginning(problem: Problem, seed: int, most: int) -> None:
    random, unit = np.random.default_rng(seed), float(problem.arrays.duration.mean()) + 1e-6
    scheduler, fresh = InjectionScheduler(problem, marks=most), InjectionScheduler(problem)
    entry = np.cumsum(random.exponential(unit, problem.microbatches))
    delay = random.normal(0, unit, (problem.pp_degree, 3 * problem.placement.chunks))
    scheduler.value(Injection(entry, delay))
    accept(scheduler.marks, 0)
    for _ in range(6):
        same = int(random.integers(0, problem.microbatches))
        later = entry.copy()
        later[same:] += random.exponential(unit)
        assert scheduler.value(Injection(later, delay), same=same) == fresh.value(Injection(later, delay))
        if random.random() < 0.5:
            accept(scheduler.marks, same)
            entry = later


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
