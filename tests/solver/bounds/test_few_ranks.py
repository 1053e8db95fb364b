"""Bounds from all schedules of a few ranks, against proven optima and against the same without shortcuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.problems import limited, limited_problems, rough_problems, uniform
from zbv_solver.bounds import few_ranks, lower_bound
from zbv_solver.bounds.directions import may_fuse
from zbv_solver.bounds.few_ranks import FewRanks, few_ranks_bound, few_ranks_bounds
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.improve.cp_search import refine
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate

PAIRS = 300_000
TIGHT = {
    "pp_degree": 4,
    "microbatches": 8,
    "costs": {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 8},
}


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_two_ranks_have_the_optimum_where_memory_is_tight(objective: str) -> None:
    """CP-SAT proved 1068, 1516 and 1964 for the makespan of 8, 12 and 16 microbatches: 112 each."""
    problems = [parse_problem(TIGHT | {"microbatches": m, "objective": objective}) for m in (8, 12, 16, 4000)]
    values = [lower_bound(problem, "thorough").value for problem in problems]
    assert values == [1068, 1516, 1964, 1964 + 112 * 3984]


def value_of(problem: Problem, orders: Orders) -> float:
    timing = evaluate(problem, orders)
    return timing.span if problem.objective == "span" else timing.makespan


def set_of_ranks(problem: Problem, chosen: int) -> tuple[int, ...]:
    """A set that is not empty."""
    ranks = tuple(rank for rank in range(problem.pp_degree) if chosen >> rank & 1)
    return ranks or (problem.pp_degree - 1,)


def bound_of(problem: Problem, ranks: tuple[int, ...]) -> float:
    few = FewRanks.of(problem, ranks)
    return 0.0 if few is None else few_ranks_bound(few, problem.microbatches, PAIRS)[0]


@given(
    st.one_of(limited_problems(max_p=3, max_m=4, kinds=("v", "loop", "single")), rough_problems()),
    st.integers(0, 7),
)
@settings(max_examples=25)
def test_never_above_an_order(problem: Problem, chosen: int) -> None:
    best = min(value_of(problem, attempt.orders) for attempt in islice(priority_schedules(problem), 3))
    assert bound_of(problem, set_of_ranks(problem, chosen)) <= best * (1 + 1e-9)


@given(limited_problems(max_p=2, max_m=3, kinds=("v", "loop", "single")), st.integers(0, 3))
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])
def test_all_ranks_have_the_optimum_and_fewer_never_more(problem: Problem, chosen: int) -> None:
    problem = replace(problem, objective="makespan", costs=replace(problem.costs, backward=None))
    assume(not may_fuse(problem).any())
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.1)
    assume(result.proved)
    optimum = value_of(problem, result.orders or start)
    assert bound_of(problem, set_of_ranks(problem, chosen)) <= optimum * (1 + 1e-9)
    whole = bound_of(problem, tuple(range(problem.pp_degree)))
    assert whole == 0.0 or whole == pytest.approx(optimum, rel=1e-8)


@given(limited_problems(max_p=3, max_m=2), st.integers(1, 7), st.integers(10, 30))
@settings(max_examples=20)
def test_the_steady_state_is_what_every_layer_would_give(problem: Problem, chosen: int, m: int) -> None:
    few = FewRanks.of(problem, set_of_ranks(problem, chosen))
    assume(few is not None)
    assert few is not None
    with pytest.MonkeyPatch.context() as patch:
        exact, early = (few_ranks_bound(few, m, pairs)[0] for pairs in (PAIRS, PAIRS // 50))
        patch.setattr(few_ranks, "_repeats", lambda *_: (0, 0))
        patch.setattr(few_ranks, "_best_shift", lambda *_: (0, 0))
        layers = few_ranks_bound(few, m, 10 * PAIRS)[0]
    assume(layers > 0)
    assert early <= layers * (1 + 1e-12)
    assert exact <= layers * (1 + 1e-12)


def test_nothing_is_tried_where_memory_is_no_constraint() -> None:
    assert not list(few_ranks_bounds(uniform(4, 8, limit=8)))
    assert not list(few_ranks_bounds(uniform(4, 8)))
    assert list(few_ranks_bounds(limited(uniform(4, 8), 0.0)))


def test_too_few_pairs_prove_nothing() -> None:
    few = FewRanks.of(parse_problem(TIGHT), (2, 3))
    assert few is not None
    value, used = few_ranks_bound(few, 8, 1000)
    assert value == 0.0
    assert used < 2000
    assert np.isclose(few_ranks_bound(few, 8, PAIRS)[0], 1068)


def test_a_stopped_bound_is_the_best_so_far() -> None:
    problem = parse_problem(TIGHT)
    asked = count()
    stopped = lower_bound(problem, "thorough", is_stopped=lambda: next(asked) >= 20)
    assert next(asked) < 30, "it goes on after the stop"
    known = lower_bound(problem).value
    assert known <= stopped.value < lower_bound(problem, "thorough").value
    assert lower_bound(problem, "thorough", is_stopped=lambda: True).value == known


@pytest.mark.parametrize("p2p", [0, 3])
def test_ranks_without_work_have_a_bound(p2p: float) -> None:
    costs = {"forward": 0, "backward_input": 0, "backward_weight": 0, "p2p": p2p}
    problem = parse_problem(TIGHT | {"costs": costs})
    assert 0.0 <= lower_bound(problem, "thorough").value <= serial(problem).value
