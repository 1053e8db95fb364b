"""Annealing: orders stay valid, repaired values stay true, and tight problems get better."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, limited, limited_problems, uniform, with_sizes
from zbv_solver.construct.board import from_orders, to_orders
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.construct.tables import make_tables
from zbv_solver.improve.annealing import (
    LEVELS,
    THREE,
    Kept,
    Round,
    Space,
    _round,
    anneal,
    anneal_in_rounds,
    is_overtaking,
    trial_of,
    window_starts,
)
from zbv_solver.improve.order_repair import critical_path
from zbv_solver.improve.order_state import State, compute_all
from zbv_solver.plans.orders import Orders, in_entry_order
from zbv_solver.problem.problem import Problem
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

TIGHT = limited(uniform(4, 12, p2p=1, objective="makespan"), 2.0)


def test_some_small_microbatches_do_overtake() -> None:
    problem = with_sizes(uniform(4, 1, p2p=1), [0.0, 19.0, 0.0, 0.0, 0.0, 0.0])
    start = next(priority_schedules(problem)).orders
    result = anneal(problem, start, moves=500, temperature=5.0, seed=1, overtakes=True)
    assert is_overtaking(problem, result.last)


@given(
    st.one_of(limited_problems(max_p=5, max_m=7, kinds=("v", "loop", "single")), differing_problems(max_m=7)),
    st.integers(0, 3),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.sampled_from([1, 30]),
)
@settings(max_examples=60)
def test_the_state_after_moves_equals_a_state_computed_afresh(
    problem: Problem, which: int, temperature: float, moves: int
) -> None:
    orders = list(priority_schedules(problem))[which].orders
    tables = make_tables(problem, entry=from_orders(orders, problem)[2])
    state = State.of(problem, orders, tables, window_starts(problem, orders))
    space, kept = Space.of(*state.code.shape), Kept.of(state, tables)
    overtakes = not problem.is_equal
    _round(
        tables,
        state,
        trial_of(state),
        kept,
        Round(moves, temperature, 3, overtakes),
        space,
        np.zeros(1, np.uint8),
    )
    last = Kept.of(state, tables).orders(problem, state.length)
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


def test_levels_keep_fewer_orders_and_spend_all_moves() -> None:
    assert sum(level.share for level in LEVELS) == 1
    assert all(later.kept < earlier.kept for earlier, later in pairwise(LEVELS))


ANY = st.one_of(
    limited_problems(max_p=5, max_m=7, kinds=("v", "loop", "single")), differing_problems(max_m=7)
)
"""Mixed I's and B's, growing I's, zero costs."""


@given(ANY, st.integers(0, 3), st.sampled_from([0.01, 1.0, 30.0]), st.booleans())
@settings(max_examples=100)
def test_orders_stay_valid_and_never_get_worse(
    problem: Problem, which: int, temperature: float, overtakes: bool
) -> None:
    """Hot rounds walk far from where they began. A second round may begin where stages differ in order."""
    orders, overtakes = list(priority_schedules(problem))[which].orders, overtakes and not problem.is_equal
    assert to_orders(*from_orders(orders, problem)[:2], problem, from_orders(orders, problem)[2]) == orders
    for seed in (1, 2):
        value = objective_of(problem, orders)
        result = anneal(problem, orders, moves=200, temperature=temperature, seed=seed, overtakes=overtakes)
        verify_orders(problem, result.orders)
        verify_orders(problem, result.last)
        assert result.value == objective_of(problem, result.orders) <= value * (1 + 1e-12)
        if problem.objective == "makespan":
            assert result.judged == pytest.approx(result.value)
        if not overtakes:
            assert in_entry_order(result.last, problem.n_stages) == result.last
        orders = result.last


def test_a_set_flag_ends_the_round() -> None:
    start = next(priority_schedules(TIGHT)).orders
    result = anneal(TIGHT, start, moves=10**9, temperature=0.1, seed=0, halt=np.ones(1, np.uint8))
    assert result.moves == 0
    assert result.orders == start


def test_rounds_are_never_worse_improve_a_tight_plan_and_follow_from_the_seed() -> None:
    start = next(priority_schedules(TIGHT))

    def rounds(seed: int) -> list[tuple[float, Orders]]:
        made = anneal_in_rounds(
            TIGHT, start.orders, start.value, rounds=2 * THREE, moves=300, factor=1.0, seed=seed
        )
        return list(made)

    ended = rounds(0)
    assert len(ended) == 2 * THREE
    assert all(later[0] <= earlier[0] for earlier, later in pairwise([(start.value, None), *ended]))
    assert ended[-1][0] < start.value
    for value, orders in ended:
        verify_orders(TIGHT, orders)
        assert value == objective_of(TIGHT, orders)
    assert ended == rounds(0) != rounds(100)
