"""Fractions of 1F1B's memory: their unit is what 1F1B really holds, and they turn into limits and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.problems import problems, uniform
from zbv_solver.construct.baselines import baseline, without_limit
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.frontiers import memory_fraction
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate

fractions = st.floats(0.01, 4.0)


def holding(problem: Problem) -> Problem:
    assume(memory_fraction.one_f_one_b_memory(problem) > 0)
    return problem


@given(problems(max_p=5, max_m=8))
def test_the_fraction_counts_in_the_largest_activation_memory_of_1f1b(problem: Problem) -> None:
    merged, orders = baseline("1f1b", problem)
    peaks = evaluate(without_limit(merged), orders).peak_memory
    held = [peak - static for peak, static in zip(peaks, problem.memory.static, strict=True)]
    assert memory_fraction.one_f_one_b_memory(problem) == pytest.approx(max(held))


def test_of_equal_stages_the_unit_is_one_pipelines_worth() -> None:
    assert memory_fraction.one_f_one_b_memory(uniform(4, 16)) == 8
    assert memory_fraction.one_f_one_b_memory(uniform(4, 2)) == 4, "no more microbatches than there are"
    assert memory_fraction.smallest(uniform(4, 16)) == 0.25


@given(problems().map(holding), fractions)
def test_a_fraction_becomes_limits_that_need_that_fraction(problem: Problem, fraction: float) -> None:
    limits = memory_fraction.limits(problem, fraction)
    assert memory_fraction.needed(problem, limits) == pytest.approx(fraction, rel=1e-9, abs=1e-9)
    limited = memory_fraction.at_fraction(problem, fraction)
    assert limited.memory.limit == limits
    assert memory_fraction.of_limit(limited) == pytest.approx(fraction, rel=1e-9, abs=1e-9)


@given(problems().map(holding))
def test_there_is_a_plan_at_the_smallest_fraction_and_none_below(problem: Problem) -> None:
    least = memory_fraction.smallest(problem)
    assume(least > 0)
    memory_fraction.at_fraction(problem, least).require_feasible()
    with pytest.raises(InfeasibleMemory):
        memory_fraction.at_fraction(problem, least * (1 - 1e-6)).require_feasible()


def test_the_tightest_rank_says_what_fraction_a_limit_is() -> None:
    problem = uniform(2, 4)
    assert memory_fraction.of_limit(problem) is None
    uneven = replace(problem, memory=replace(problem.memory, limit=(4.0, 6.0)))
    assert memory_fraction.of_limit(uneven) == 1.0


def test_nothing_held_is_nothing_to_take_a_fraction_of() -> None:
    problem = uniform(2, 4)
    empty = replace(
        problem,
        memory=replace(
            problem.memory, forward=(0.0,) * 4, backward_input=(0.0,) * 4, backward_weight=(0.0,) * 4
        ),
    )
    with pytest.raises(InvalidInput, match="/memory"):
        memory_fraction.smallest(empty)
    with pytest.raises(InvalidInput, match="/memory"):
        memory_fraction.needed(empty, (1.0, 1.0))


def test_the_unit_of_microbatches_that_differ_does_not_depend_on_their_order() -> None:
    def holding_tokens(tokens: list[int]) -> Problem:
        return parse_problem(
            {
                "pp_degree": 2,
                "microbatches": len(tokens),
                "features": {"tokens": tokens},
                "costs": {"forward": {"tokens": 1}, "backward_input": 1, "backward_weight": 1, "p2p": 0},
                "memory": {
                    "forward": {"tokens": 1},
                    "backward_input": {"tokens": -0.5},
                    "backward_weight": {"tokens": -0.5},
                    "static": 10,
                },
            }
        )

    assert memory_fraction.one_f_one_b_memory(holding_tokens([1, 2, 3, 6])) == 2 * 2 * 3
    assert memory_fraction.one_f_one_b_memory(holding_tokens([6, 3, 1, 2])) == 2 * 2 * 3
    long = holding_tokens([1, 1, 1, 40])
    assert memory_fraction.one_f_one_b_memory(long) == 2 * 40, "the largest microbatch fits"
    memory_fraction.at_fraction(long, 1.0).require_feasible()
