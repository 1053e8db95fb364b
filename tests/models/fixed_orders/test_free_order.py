"""A step in a free order is never longer than the executor's: its order is one of the candidates."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import layer, layered
from zbv_models.fixed_orders.best_cut import best_cut, free_plan, improved_plan
from zbv_models.fixed_orders.schedules import megatron_schedule
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.options import PHASES, SearchOptions

NO_SEARCH = SearchOptions("quick", without=PHASES)


def model_of(times: list[int], **changes: Any) -> LayeredProblem:
    layers = [layer(f"l{number}", time, held=2) for number, time in enumerate(times)]
    return layered(2, 8, layers, 1, placement="v", **changes)


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_free_order_is_not_longer(random: Random) -> None:
    problem = model_of([random.randint(1, 9) for _ in range(random.randint(4, 7))])
    best = best_cut(problem, [megatron_schedule(2, 8, chunks) for chunks in (1, 2)], effort="quick")
    free = free_plan(problem, best, NO_SEARCH)
    assert free.objective <= best.objective * (1 + 1e-9)
    assert free.cut is not None
    assert free.cut.lower_bound <= free.objective * (1 + 1e-9)


def test_the_executors_placement_is_used_where_its_own_is_longer_or_does_not_fit() -> None:
    """Two layers fit one rank each, but four stages of a V do not exist."""
    problem = model_of([9, 1, 1, 9], memory={"limit": 9})
    best = best_cut(problem, [megatron_schedule(2, 8, 1)], effort="quick")
    free = free_plan(problem, best, NO_SEARCH)
    assert free.objective <= best.objective
    improved = improved_plan(best, NO_SEARCH)
    assert improved.problem.placement.kind == "single"
    # A free order overlaps transfers with actions, as zbv's runtime does.
    assert list(best.problem.costs.p2p) == [0]
    assert list(improved.problem.costs.p2p) == [1]
    assert improved.objective < best.objective
    assert improved_plan(best, None).orders == best.orders


@pytest.mark.parametrize("is_blocking", [False, True])
def test_transfers_of_a_free_order_block_only_if_the_problem_says_so(is_blocking: bool) -> None:
    best = best_cut(model_of([3, 3, 3, 3]), [megatron_schedule(2, 8, 1)], effort="quick")
    improved = improved_plan(best, None, is_blocking=is_blocking)
    assert (improved.objective == best.objective) is is_blocking
