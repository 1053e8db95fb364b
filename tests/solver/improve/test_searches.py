"""Searches over rules and injections: orders are valid, ever better, and follow from the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import (
    differing_problems,
    limited,
    limited_problems,
    rough_problems,
    uniform,
    uniform_document,
    with_sizes,
)
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.board import Attempt
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.greedy_v import GREEDY_COST
from zbv_solver.construct.rules import Rule, injection, no_delay, simple_rule
from zbv_solver.improve.injection_search import injection_search
from zbv_solver.improve.overtaking_search import large_ones, overtaking_search
from zbv_solver.improve.parameter_search import (
    FEW_MICROBATCHES,
    RestClimber,
    RuleClimber,
    parameter_search,
    rest_search,
)
from zbv_solver.problem.problem import F, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import earliest_start_values, earliest_times, objective_of
from zbv_solver.verify.verifier import verify_orders

KINDS = ("v", "loop", "single")
TIGHT = limited(uniform(4, 12, p2p=1), 2.0)


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
    # No microbatch enters before its time.
    board, tables = scheduler.board, scheduler.tables
    begin = board.end[0] - tables.duration[tables.host[0], F, tables.kind]
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


@pytest.mark.parametrize(("share", "ratio"), [(0.4, 1.02), (0.35, 1.15)])
def test_the_smallest_budget_tries_several_even_injections(share: float, ratio: float) -> None:
    """So large problems, for which quick searches place few actions, still get an order that keeps pace.

    At 0.35, microbatches must enter more slowly than the load of the ranks would allow.
    """
    problem = uniform(32, 256, limit=share * 64)
    (attempt,) = [a for a in injection_search(problem, 1) if a is not None]
    assert attempt.value <= ratio * lower_bound(problem).value


ONE_LARGE = with_sizes(uniform(8, 1), [0.0] * 5 + [29.0] + [0.0] * 24)


def test_large_ones_are_those_before_the_largest_step_in_size() -> None:
    problem = with_sizes(uniform(16, 1), [0.0, 30.0, 0.1, 28.0, 0.0, 0.2, 0.0, 0.0])
    assert large_ones(problem).tolist() == [1, 3]


def test_no_microbatch_is_large_where_the_work_of_a_rank_decides() -> None:
    assert len(large_ones(uniform(4, 8))) == 0
    assert len(large_ones(with_sizes(uniform(2, 1), [1.0] + [0.0] * 30))) == 0
    assert len(large_ones(with_sizes(uniform(16, 1), [1.2, 1.1, 1.0, 0.9]))) == 0


def parameters(problem: Problem, orders: int, seed: int = 0) -> list[Attempt]:
    return better(parameter_search(problem, orders * problem.max_actions, seed))


def suffixes(problem: Problem, orders: int, seed: int = 0) -> list[Attempt]:
    return better(rest_search(problem, serial(problem).orders, orders * problem.max_actions, seed))


def injections(problem: Problem, orders: int, seed: int = 0) -> list[Attempt]:
    return better(injection_search(problem, 10 * orders * problem.max_actions, seed))


def better(attempts: Iterator[Attempt | None]) -> list[Attempt]:
    return [attempt for attempt in attempts if attempt is not None]


@given(st.one_of(limited_problems(max_p=4, max_m=6, kinds=KINDS), rough_problems(max_p=3, max_m=5)))
@settings(max_examples=30)
def test_attempts_are_valid_and_each_better_than_the_last(problem: Problem) -> None:
    tuned, laid, injected = (search(problem, 40) for search in (parameters, suffixes, injections))
    for attempts in (tuned, [serial(problem), *laid]):
        assert all(later.value < earlier.value for earlier, later in pairwise(attempts))
    for attempt in (*tuned, *laid, *injected):
        verify_orders(problem, attempt.orders)
        makespan, span = earliest_start_values(problem, attempt.orders)
        assert attempt.value == pytest.approx(span if problem.objective == "span" else makespan, rel=1e-12)


@pytest.mark.parametrize("search", [parameters, suffixes, injections])
def test_searches_gain_where_memory_is_tight_and_follow_from_the_seed(
    search: Callable[[Problem, int, int], list[Attempt]],
) -> None:
    fixed = min(attempt.value for attempt in priority_schedules(TIGHT))
    assert min(attempt.value for attempt in search(TIGHT, 300, 0)) < 0.95 * fixed
    looped = limited(parse_problem({**uniform_document(4, 12, p2p=1), "placement": "loop"}), 2.0)
    first, again, other = (
        [(attempt.method, attempt.orders) for attempt in search(looped, 80, seed)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_many_microbatches_are_tuned_at_few() -> None:
    """At 40 times the microbatches a budget of 8 orders still finds valid ones."""
    problem = limited(uniform(4, 640, p2p=1), 3.0)
    attempts = parameters(problem, 8)
    for attempt in attempts:
        verify_orders(problem, attempt.orders)
    assert f"tuned_at={4 * FEW_MICROBATCHES}" in attempts[-1].method


def test_a_set_flag_ends_an_evaluation() -> None:
    problem = limited(uniform(4, 512, p2p=1), 2.0)
    rule = simple_rule(problem, "backward-deep", 1.0, 0.5)
    assert ListScheduler(problem, halt=np.ones(1, np.uint8)).attempt(rule, "") is None


def test_overtaking_is_ever_better_and_better_than_one_order_of_entry() -> None:
    attempts = [each for each in overtaking_search(ONE_LARGE, 300 * ONE_LARGE.max_actions, seed=1) if each]
    values = [value for value, _ in attempts]
    assert values == sorted(values, reverse=True)
    for value, orders in attempts:
        verify_orders(ONE_LARGE, orders)
        assert objective_of(ONE_LARGE, orders) <= value * (1 + 1e-9)
    assert values[-1] < min(attempt.value for attempt in priority_schedules(ONE_LARGE))
