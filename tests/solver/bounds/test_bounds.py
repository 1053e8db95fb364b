"""Lower bounds: below every constructed order, exact where the load or one path decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from support.problems import limited_problems, problems, uniform
from support.reference import all_orders_of_one_microbatch
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import evaluate


@given(problems(max_p=3, max_m=1))
@settings(max_examples=40)
def test_no_order_of_one_microbatch_is_better(problem: Problem) -> None:
    """Every order there is, fused and split, under both objectives."""
    span, makespan = (
        lower_bound(replace(problem, objective=objective)).value for objective in ("span", "makespan")
    )
    for orders in all_orders_of_one_microbatch(problem):
        timing = evaluate(problem, orders)
        assert span <= timing.span * (1 + 1e-9) + 1e-9
        assert makespan <= timing.makespan * (1 + 1e-9) + 1e-9


@given(limited_problems(max_p=5, max_m=8, kinds=("v", "loop", "single")))
def test_no_constructed_order_is_better(problem: Problem) -> None:
    bound = lower_bound(problem).value
    assert all(bound <= a.value * (1 + 1e-9) + 1e-9 for a in priority_schedules(problem))


@given(problems(max_p=6, max_m=8, kinds=("v", "loop", "single")))
def test_never_below_the_load_of_the_busiest_rank(problem: Problem) -> None:
    load = max(problem.busy_time(rank) for rank in range(problem.pp_degree))
    assert lower_bound(problem).value >= load * (1 - 1e-12)


@given(limited_problems(max_p=6, max_m=8, kinds=("v", "loop", "single")))
def test_full_effort_is_never_weaker_than_quick(problem: Problem) -> None:
    assert lower_bound(problem).value >= lower_bound(problem, effort="quick").value


def test_an_empty_ramp_of_a_long_run_is_seen() -> None:
    """Only the ends of a long run are looked at; what memory costs there is there at any length."""
    costs = [
        lower_bound(uniform(8, m, limit=12, objective="makespan")).value
        - lower_bound(uniform(8, m, limit=12, objective="makespan"), effort="quick").value
        for m in (64, 2000)
    ]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
    assert costs[0] > 0


def test_a_makespan_also_waits_for_the_first_input_and_the_last_gradient() -> None:
    """Rank 3's first input comes after 3 F, so it ends no earlier than 3 + 6 m."""
    assert lower_bound(uniform(4, 16, objective="span")).value == 96
    assert lower_bound(uniform(4, 16, objective="makespan")).value == 99


def test_one_microbatch_takes_its_whole_path() -> None:
    """8 F, 8 I, 6 transfers each way, and the last W."""
    assert lower_bound(uniform(4, 1, p2p=2)).value == 8 + 8 + 2 * 6 * 2 + 1
