"""Annealing in scenarios: values are those of the simulation, and orders stay valid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import limited, limited_problems, uniform
from zbv_solver.construct.list_scheduling import priority_schedules
from zbv_solver.improve.scenario_annealing import anneal_in_scenarios
from zbv_solver.jitter.noise import Jitter, draw
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of
from zbv_solver.timing.step_times import WARM_UP, iteration_times
from zbv_solver.verify.verifier import verify_orders

JITTER = Jitter.of(action=0.1, transfer=0.3, rank=0.05)
TIGHT = limited(uniform(4, 8, p2p=1, objective="makespan"), 2.0)
SOME = limited_problems(max_p=4, max_m=5, kinds=("v", "loop", "single"))


@given(SOME, st.integers(0, 3), st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=30)
def test_orders_stay_valid_and_never_get_worse(problem: Problem, which: int, temperature: float) -> None:
    """Mixed I's and B's, growing I's, zero costs; hot rounds walk far from where they began."""
    start = list(priority_schedules(problem))[which].orders
    draws = draw(JITTER, problem, 1, range(4), 0)
    found = anneal_in_scenarios(problem, start, draws, moves=100, temperature=temperature, seed=1)
    verify_orders(problem, found.orders)
    verify_orders(problem, found.last)
    assert found.value <= found.first


@given(
    limited_problems(max_p=4, max_m=5, kinds=("v", "loop", "single"), objective="makespan"),
    st.sampled_from([0.0, 1.6]),
)
@settings(max_examples=30)
def test_repaired_values_are_those_of_a_fresh_computation(problem: Problem, weight: float) -> None:
    start = next(priority_schedules(problem)).orders
    draws = draw(JITTER, problem, 1, range(4), 0)
    found = anneal_in_scenarios(problem, start, draws, moves=100, temperature=5.0, seed=2, weight=weight)
    afresh = anneal_in_scenarios(
        problem, found.orders, draws, moves=0, temperature=0.0, seed=0, weight=weight
    )
    assert afresh.first == found.value


def test_scores_are_those_of_the_simulation() -> None:
    start = next(priority_schedules(TIGHT)).orders
    draws = draw(JITTER, TIGHT, 7, range(16), WARM_UP)
    times = iteration_times(TIGHT, start, JITTER, scenarios=16, seed=7).makespan
    for weight in (0.0, 1.6):
        found = anneal_in_scenarios(TIGHT, start, draws, moves=0, temperature=0.0, seed=0, weight=weight)
        assert found.first == pytest.approx(times.mean() + weight * np.std(times))


@given(SOME)
@settings(max_examples=30)
def test_without_jitter_the_score_is_the_objective(problem: Problem) -> None:
    start = next(priority_schedules(problem)).orders
    draws = draw(Jitter(), problem, 0, range(2), 0)
    found = anneal_in_scenarios(problem, start, draws, moves=0, temperature=0.0, seed=0)
    assert found.first == pytest.approx(objective_of(problem, start))


def test_annealing_helps_in_scenarios_that_it_did_not_see() -> None:
    start = next(priority_schedules(TIGHT)).orders
    draws = draw(JITTER, TIGHT, 7, range(32), 0)
    found = [anneal_in_scenarios(TIGHT, start, draws, moves=1000, temperature=0.1, seed=3) for _ in range(2)]
    assert found[0].orders.all_text() == found[1].orders.all_text()
    before, after = (
        iteration_times(TIGHT, orders, JITTER, scenarios=256, seed=8).makespan.mean()
        for orders in (start, found[0].orders)
    )
    assert after < 0.99 * before
