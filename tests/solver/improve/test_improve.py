"""Searches over rules, injections and moves: orders are valid, ever better, and follow from the seed."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import fitting_orders
from support.problems import differing_problems, limited_problems, rough_problems, uniform, with_sizes
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.board import Attempt, from_orders, to_orders
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.rules import injection, no_delay, simple_rule
from zbv_solver.construct.tables import make_tables
from zbv_solver.improve import annealing
from zbv_solver.improve.injection_search import injection_search
from zbv_solver.improve.order_repair import critical_path
from zbv_solver.improve.order_state import State, compute_all
from zbv_solver.improve.overtaking_search import large_ones, overtaking_search
from zbv_solver.improve.parameter_search import RestClimber, RuleClimber, parameter_search, rest_search
from zbv_solver.kernels.jit import IntArray
from zbv_solver.plans.orders import Orders, in_entry_order
from zbv_solver.problem.problem import F, Problem, W
from zbv_solver.timing.start_times import earliest_start_values, earliest_times, evaluate, objective_of
from zbv_solver.verify.verifier import verify_orders

KINDS = ("v", "loop", "single")
SMALL = limited_problems(max_p=4, max_m=6, kinds=KINDS)
TIGHT = uniform(4, 12, p2p=1, limit=4)


@given(SMALL, st.floats(0, 1), st.integers(0, 99))
def test_what_starts_before_the_cut_is_kept(problem: Problem, share: float, seed: int) -> None:
    """W's may come in any order there; constructors run the oldest one first."""
    scheduler, rule = ListScheduler(problem), simple_rule(problem, "forward-deep", 1.0, 0.0)
    for orders in (next(priority_schedules(problem)).orders, *fitting_orders(problem, Random(seed), 2)):
        kept = started(problem, orders, share * evaluate(problem, orders).makespan)
        code = from_orders(orders, problem)[0]
        assert scheduler.value(rule, kept=(code, kept)) < np.inf
        attempt = Attempt.of("again", problem, scheduler.tables, scheduler.board)
        for rank, until in enumerate(kept):
            assert np.array_equal(attempt.code[rank, :until], code[rank, :until])
        verify_orders(problem, attempt.orders)


def started(problem: Problem, orders: Orders, time: float) -> IntArray:
    """How many actions of every rank start before a time."""
    begins = earliest_times(problem, orders)[0]
    ranks = range(problem.pp_degree)
    return np.array([np.searchsorted(begins[orders.slice_of(rank)], time) for rank in ranks])


def test_the_order_remembers_which_rule_laid_which_stretch() -> None:
    """Laid again from the last cut on by the rule of that cut, the order is as good."""
    problem = uniform(4, 12, limit=6, p2p=1)
    scheduler = ListScheduler(problem)
    first: Any = scheduler.attempt(simple_rule(problem, "backward-deep", 1.0, 0.5), "first")
    climber = RestClimber(RuleClimber(problem, seed=0), first.orders, first.rule)
    assert sum(climber.step() for _ in range(400)) > 0
    cuts, rules = zip(*climber.laid, strict=True)
    assert list(cuts) == sorted({0.0, *cuts})
    kept: Any = climber.found.code, started(problem, climber.found.orders, cuts[-1])
    assert scheduler.value(rules[-1], kept=kept) == climber.best < first.value


@given(SMALL | differing_problems(), st.integers(0, 2**31))
def test_every_injection_gives_a_valid_order(problem: Problem, seed: int) -> None:
    scheduler, random = ListScheduler(problem), np.random.default_rng(seed)
    unit, m = float(problem.arrays.duration.mean()) + 1e-6, problem.microbatches
    delay = random.normal(0, unit, no_delay(problem).shape)
    rule = injection(problem, random.permutation(m), np.cumsum(random.exponential(unit, m)), delay)
    attempt: Any = scheduler.attempt(rule, "injection")
    verify_orders(problem, attempt.orders)
    value = scheduler.value(rule)
    assert attempt.value <= value * (1 + 1e-9)
    # No microbatch enters before its time.
    board, tables = scheduler.board, scheduler.tables
    begin = board.end[0] - tables.duration[tables.host[0], F, tables.kind]
    assert (begin >= rule.time * (1 - 1e-12) - 1e-12).all()
    # An order is either laid whole, with the value that it has anyway, or is worse than the bar.
    for laid in (rule, *(simple_rule(problem, f"{way}-deep", 0.75, 0.5) for way in ("backward", "forward"))):
        value = scheduler.value(laid)
        for share in (0.5, 0.9, 1 + 1e-9, 1.2):
            known = (value,) if share >= 1 else (value, np.inf)
            assert scheduler.value(laid, most=share * value) in known


def test_a_rank_idles_for_an_action_that_other_actions_are_delayed_for() -> None:
    """With W's delayed by far, every W comes after all F's and I's of its rank."""
    problem = uniform(4, 8)
    delay = no_delay(problem)
    delay[:, 4:] = 1e9
    rule = injection(problem, np.arange(8), np.zeros(8), delay)
    attempt: Any = ListScheduler(problem).attempt(rule, "injection")
    for code, length in zip(attempt.code, attempt.length, strict=True):
        assert (code[length - 16 : length] & 3 == W).all()


def test_a_microbatch_that_completes_makes_room_for_one_more_only() -> None:
    """Rank 1 holds 1 on its outer chunk and 2 on the inner one; two more on the outer one block it."""
    held = [0, 1, 0, 0, 0, 0, 2, 0]
    memory = {"forward": held, "backward_input": [-amount for amount in held], "backward_weight": 0}
    scheduler = ListScheduler(uniform(4, 3, memory=memory | {"limit": 3}))
    for random in map(np.random.default_rng, range(20)):
        time, delay = np.cumsum(random.exponential(1.0, 3)), random.normal(0, 9, (4, 6))
        attempt: Any = scheduler.attempt(injection(scheduler.problem, np.arange(3), time, delay), "injection")
        verify_orders(scheduler.problem, attempt.orders)


@pytest.mark.parametrize(("share", "ratio"), [(0.4, 1.02), (0.35, 1.15)])
def test_the_smallest_budget_tries_several_even_injections(share: float, ratio: float) -> None:
    """So large problems, for which quick searches place few actions, still get an order that keeps pace.

    At 0.35, microbatches must enter more slowly than the load of the ranks would allow.
    """
    problem = uniform(32, 256, limit=share * 64)
    (attempt,) = [a for a in injection_search(problem, 1) if a is not None]
    assert attempt.value <= ratio * lower_bound(problem).value


def test_large_ones_are_those_before_the_largest_step_in_size() -> None:
    """There are none where the work of a rank decides, or without a large step in size."""
    ends = with_sizes(uniform(16, 1), [0.0, 30.0, 0.1, 28.0, 0.0, 0.2, 0.0, 0.0])
    assert large_ones(ends).tolist() == [1, 3]
    for p, sizes in (4, [0.0] * 8), (2, [1.0] + [0.0] * 30), (16, [1.2, 1.1, 1.0, 0.9]):
        assert large_ones(with_sizes(uniform(p, 1), sizes)).tolist() == []


def parameters(problem: Problem, orders: int, seed: int = 0) -> list[Attempt]:
    return [*filter(None, parameter_search(problem, orders * problem.max_actions, seed))]


def suffixes(problem: Problem, orders: int, seed: int = 0) -> list[Attempt]:
    start = serial(problem).orders
    return [*filter(None, rest_search(problem, start, orders * problem.max_actions, seed))]


def injections(problem: Problem, orders: int, seed: int = 0) -> list[Attempt]:
    return [*filter(None, injection_search(problem, 10 * orders * problem.max_actions, seed))]


@given(SMALL | rough_problems(max_p=3, max_m=5))
def test_attempts_are_valid_and_each_better_than_the_last(problem: Problem) -> None:
    tuned, laid, injected = (search(problem, 40) for search in (parameters, suffixes, injections))
    for attempts in (tuned, [serial(problem), *laid]):
        assert all(later.value < earlier.value for earlier, later in pairwise(attempts))
    for attempt in (*tuned, *laid, *injected):
        verify_orders(problem, attempt.orders)
        makespan, span = earliest_start_values(problem, attempt.orders)
        assert attempt.value == pytest.approx(span if problem.objective == "span" else makespan, rel=1e-12)


@pytest.mark.parametrize("search", [parameters, suffixes, injections])
def test_searches_gain_where_memory_is_tight_and_follow_from_the_seed(search: Any) -> None:
    best, fixed = (min(a.value for a in of) for of in (search(TIGHT, 300, 0), priority_schedules(TIGHT)))
    assert best < 0.95 * fixed
    looped = uniform(4, 12, p2p=1, limit=4, placement="loop")
    first, again, other = ([(a.method, a.orders) for a in search(looped, 80, seed)] for seed in (1, 1, 2))
    assert first == again != other


def test_many_microbatches_are_tuned_at_few() -> None:
    """At 40 times the microbatches a budget of 8 orders still finds valid ones."""
    problem = uniform(4, 640, p2p=1, limit=5)
    for attempt in (attempts := parameters(problem, 8)):
        verify_orders(problem, attempt.orders)
    assert "tuned_at=" in attempts[-1].method


def test_overtaking_is_ever_better_and_better_than_one_order_of_entry() -> None:
    problem = with_sizes(uniform(8, 1), [0.0] * 5 + [29.0] + [0.0] * 24)
    attempts = [*filter(None, overtaking_search(problem, 300 * problem.max_actions, seed=1))]
    values = [value for value, _ in attempts]
    assert values == sorted(values, reverse=True)
    for value, orders in attempts:
        verify_orders(problem, orders)
        assert objective_of(problem, orders) <= value * (1 + 1e-9)
    assert values[-1] < min(attempt.value for attempt in priority_schedules(problem))


ANY = st.one_of(limited_problems(max_p=5, max_m=7, kinds=KINDS), differing_problems(max_m=7))
"""Mixed I's and B's, growing I's, zero costs."""


def test_some_small_microbatches_do_overtake() -> None:
    problem = with_sizes(uniform(4, 1, p2p=1), [0.0, 19.0, 0.0, 0.0, 0.0, 0.0])
    start = next(priority_schedules(problem)).orders
    result = annealing.anneal(problem, start, moves=500, temperature=5.0, seed=1, overtakes=True)
    assert annealing.is_overtaking(problem, result.last)


@given(ANY, st.integers(0, 3), st.sampled_from([0.01, 1.0, 30.0]), st.sampled_from([1, 30]))
@settings(max_examples=60)
def test_the_state_after_moves_is_exact(problem: Problem, which: int, temperature: float, moves: int) -> None:
    orders = list(priority_schedules(problem))[which].orders
    tables = make_tables(problem, entry=from_orders(orders, problem)[2])
    state = State.of(problem, orders, tables, annealing.window_starts(problem, orders))
    space, kept = annealing.Space.of(*state.code.shape), annealing.Kept.of(state, tables)
    budget, halt = annealing.Round(moves, temperature, 3, not problem.is_equal), np.zeros(1, np.uint8)
    annealing._round(tables, state, annealing.trial_of(state), kept, budget, space, halt)
    last = annealing.Kept.of(state, tables).orders(problem, state.length)
    fresh = State.of(problem, last, tables, state.release)
    compute_all(tables, fresh)
    for rank, until in enumerate(state.length):
        assert (state.microbatch[rank, :until] == fresh.microbatch[rank, :until]).all()
        for mine, exact in ((state.end, fresh.end), (state.tail, fresh.tail), (state.held, fresh.held)):
            assert (mine[rank, :until] == exact[rank, :until]).all()  # the sums are the same
    assert (state.place == fresh.place).all()
    assert (state.passed_on == fresh.passed_on).all()
    path = np.zeros_like(space.path)
    size = critical_path(tables, fresh, path)
    assert (space.path[:size] == path[:size]).all()


@given(ANY, st.integers(0, 3), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
@settings(max_examples=100)
def test_orders_never_get_worse(problem: Problem, which: int, temperature: float, overtakes: bool) -> None:
    """Hot rounds walk far from where they began. A second round may begin where stages differ in order."""
    orders, overtakes = list(priority_schedules(problem))[which].orders, overtakes and not problem.is_equal
    assert to_orders(*from_orders(orders, problem)[:2], problem, from_orders(orders, problem)[2]) == orders
    for seed in (1, 2):
        value = objective_of(problem, orders)
        result = annealing.anneal(
            problem, orders, moves=200, temperature=temperature, seed=seed, overtakes=overtakes
        )
        verify_orders(problem, result.orders)
        verify_orders(problem, result.last)
        assert result.value == objective_of(problem, result.orders) <= value * (1 + 1e-12)
        if problem.objective == "makespan":
            assert result.judged == pytest.approx(result.value)
        if not overtakes:
            assert in_entry_order(result.last, problem.n_stages) == result.last
        orders = result.last


def test_a_set_flag_ends_an_evaluation_and_a_round() -> None:
    halt, problem = np.ones(1, np.uint8), uniform(4, 512, p2p=1, limit=4)
    rule = simple_rule(problem, "backward-deep", 1.0, 0.5)
    assert ListScheduler(problem, halt=halt).attempt(rule, "") is None
    start = next(priority_schedules(TIGHT)).orders
    result = annealing.anneal(TIGHT, start, moves=10**9, temperature=0.1, seed=0, halt=halt)
    assert (result.moves, result.orders) == (0, start)
