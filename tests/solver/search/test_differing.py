"""Searches for microbatches that differ: valid plans at every limit, the order of entry, and resuming."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import differing_problems, uniform, with_sizes
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.board import Board, place, stays_safe
from zbv_solver.construct.rules import changed, mountain
from zbv_solver.construct.tables import make_tables, sizes
from zbv_solver.problem.problem import F, Problem
from zbv_solver.search.claims import prove_bound
from zbv_solver.search.options import Budget, Effort, SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify

QUICK = SearchOptions(effort="quick")


def heavy(p: int, m: int, limit: float | None) -> Problem:
    """Unit costs; every fifth microbatch is five times as large as the others."""
    return with_sizes(uniform(p, m, limit=limit), [4.0 if k % 5 == 2 else 0.0 for k in range(m)])


def test_the_given_order_does_not_matter() -> None:
    """The search chooses where a large microbatch enters, wherever the caller has it."""
    values = []
    for large in (0, 5):
        plan = search(with_sizes(uniform(4, 8), [9.0 * (k == large) for k in range(8)]), QUICK)
        entry = plan.orders.microbatch[(plan.orders.stage == 0) & (plan.orders.letter == F)]
        assert entry[0] != large  # the first microbatch delays all ranks
        values.append(plan.objective)
    assert max(values) <= 1.02 * min(values)
    # Equal features give the plan of equal microbatches.
    assert mountain(sizes(uniform(2, 5)), 0.5).tolist() == [0, 1, 2, 3, 4]
    problem = with_sizes(uniform(4, 8, limit=16), [1.0] * 8)
    assert search(problem, QUICK).orders == search(problem.averaged(), QUICK).orders


def test_an_order_whose_stages_differ_may_be_resumed() -> None:
    problem = heavy(2, 5, None)
    incumbent = random_orders(problem, Random(1))
    plan = search(problem, SearchOptions(without=("tune", "inject")), incumbent=incumbent)
    verify(plan)
    assert plan.objective <= objective_of(problem, incumbent) * (1 + 1e-9)


BUDGET = Budget(2_000, 0.75, 4_000_000, 1_000, 5_600, 84, 400_000, 2_600, 120, 0.01, 60, 0.01)
WORSE = [
    with_sizes(uniform(3, len(size), limit=12.8, p2p=1), size)
    for size in ([1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 1.0, 3.0, 0.5], [0.0, 1.0, 3.0, 0.5, 0.0, 2.0, 2.0])
]
"""The larger budget alone finds less here, because it leads random choices elsewhere."""


@given(differing_problems(max_p=3, max_m=6))
@example(WORSE[0])
@example(WORSE[1])
@settings(max_examples=8)
def test_thorough_is_never_worse_than_standard(problem: Problem) -> None:
    more = replace(BUDGET, tuned=11_200, annealed=800_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbv_solver.search.options.DIFFERING", {"standard": BUDGET, "thorough": more})
        standard, thorough = (search(problem, SearchOptions(effort=each)) for each in get_args(Effort)[1:])
    verify(thorough)
    assert thorough.objective <= standard.objective * (1 + 1e-9)
    assert thorough.metrics.lower_bound >= standard.metrics.lower_bound * (1 - 1e-9)


def test_cp_sat_proves_a_small_plan_optimal() -> None:
    problem = heavy(2, 4, 30.0)
    plan = search(problem, SearchOptions(without=("tune", "inject")))
    assert plan.metrics.status == "optimal"
    assert lower_bound(problem, "thorough").value < plan.metrics.lower_bound
    assert "CP-SAT" in prove_bound(plan, plan.metrics.lower_bound)


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=12), st.floats(0, 1), st.integers(0, 99))
def test_a_mountain_is_a_permutation_that_rises_and_falls(size: list[float], peak: float, seed: int) -> None:
    order, begin = mountain(np.array(size), peak), seed % len(size)
    other = changed(order, np.random.default_rng(seed), begin)
    assert sorted(order) == sorted(other) == list(range(len(size)))
    assert (order[:begin] == other[:begin]).all()
    steps, top = np.diff(np.array(size)[order]), round(peak * (len(size) - 1))
    if len(set(size)) == len(size):
        assert (np.sign(steps) == [1] * top + [-1] * (len(steps) - top)).all()


def test_a_small_microbatch_must_not_take_what_a_large_one_still_needs() -> None:
    """The older microbatch needs 5 more for its second forward, so the younger one has to wait."""
    memory = {"forward": 1, "backward_input": 0, "backward_weight": -1}
    for limit, is_safe in ((12, False), (13, True)):
        problem = with_sizes(uniform(2, 1, memory=memory | {"limit": limit}), [4.0, 2.0])
        board = Board.of(tables := make_tables(problem))
        board.level[:, 1] = tables.static
        place(tables, board, 0, F, 0.0)
        assert stays_safe(tables, board, 0, 0) == is_safe
        verify(search(problem, QUICK))
