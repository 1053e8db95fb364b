"""Searches for microbatches that differ: valid plans at every limit, the order of entry, and resuming."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import differing_problems, uniform, with_sizes
from zbv_solver.bounds import lower_bound
from zbv_solver.construct.board import Board, place, stays_safe
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.construct.rules import changed, mountain
from zbv_solver.construct.tables import make_tables, sizes
from zbv_solver.improve.annealing import anneal
from zbv_solver.plans.orders import in_entry_order
from zbv_solver.problem.jitter import parse_jitter
from zbv_solver.problem.problem import F, Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.claims import prove_bound
from zbv_solver.search.jitter import search_for_jitter
from zbv_solver.search.options import Budget, Effort, SearchOptions, budgets_of
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify, verify_orders

BOTH: tuple[Effort, ...] = ("standard", "thorough")
QUICK = SearchOptions(effort="quick")


def heavy(p: int, m: int, limit: float | None) -> Problem:
    """Unit costs; every fifth microbatch is five times as large as the others."""
    return with_sizes(uniform(p, m, limit=limit), [4.0 if k % 5 == 2 else 0.0 for k in range(m)])


@given(differing_problems(max_p=4, max_m=8))
@settings(max_examples=12)
def test_every_feasible_limit_gives_a_verified_plan(problem: Problem) -> None:
    plan = search(problem, QUICK)
    verify(plan)
    assert plan.metrics.lower_bound <= plan.objective * (1 + 1e-9)


@given(differing_problems(max_p=4, max_m=8))
@settings(max_examples=30)
def test_every_constructed_order_is_valid(problem: Problem) -> None:
    """The smallest limits leave room for nothing but what the banker's algorithm admits."""
    for attempt in [serial(problem), *priority_schedules(problem)][:20]:
        verify_orders(problem, attempt.orders)


@given(differing_problems(max_p=4, max_m=8), st.integers(0, 100), st.floats(0, 0.5))
@settings(max_examples=30)
def test_annealing_keeps_an_order_valid(problem: Problem, seed: int, temperature: float) -> None:
    start = serial(problem)
    result = anneal(problem, start.orders, moves=60, temperature=temperature, seed=seed)
    for orders in (result.orders, result.last):
        verify_orders(problem, orders)
    assert result.value <= start.value * (1 + 1e-9)
    assert result.value == pytest.approx(objective_of(problem, result.orders))


def test_the_given_order_does_not_matter() -> None:
    """The search chooses where a large microbatch enters, wherever the caller has it."""
    found = []
    for large in (0, 5):
        problem = with_sizes(uniform(4, 8), [9.0 if k == large else 0.0 for k in range(8)])
        plan = search(problem, QUICK)
        entry = plan.orders.microbatch[(plan.orders.stage == 0) & (plan.orders.letter == F)].tolist()
        found.append((plan.objective, entry.index(large)))
    assert max(found)[0] <= 1.02 * min(found)[0]
    assert all(place > 0 for _, place in found)  # the first microbatch delays all ranks


def test_equal_features_give_the_plan_of_equal_microbatches() -> None:
    problem = with_sizes(uniform(4, 8, limit=16), [1.0] * 8)
    plain = problem.averaged()
    assert search(problem, QUICK).orders == search(plain, QUICK).orders


@pytest.mark.parametrize(("time", "memory"), [(1e-3, 1e9), (1 / 3, 1e-4)])
def test_the_plan_does_not_depend_on_units(time: float, memory: float) -> None:
    problem = heavy(4, 10, 24.0)

    def scaled(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
        return tuple(value * factor for value in values)

    def in_units(costs: Any, deltas: Any) -> tuple[Any, Any]:
        return (
            costs.mapped(lambda row: scaled(row, time), scaled(costs.p2p, time)),
            {name: scaled(row, memory) for name, row in vars(deltas).items() if row is not None},
        )

    costs, deltas = in_units(problem.costs, problem.memory)
    feature = problem.features[0]
    own, held = in_units(feature.costs, feature.memory)
    other = replace(
        problem,
        costs=costs,
        memory=replace(problem.memory, **deltas),
        features=(replace(feature, costs=own, memory=replace(feature.memory, **held)),),
    )
    assert search(other, QUICK).orders == search(problem, QUICK).orders


@pytest.mark.parametrize("effort", ["quick", "standard"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_verified_order_may_be_resumed(effort: Any, seed: int) -> None:
    """Stages of the incumbent run the microbatches in different orders."""
    problem = heavy(2, 5, None)
    incumbent = random_orders(problem, Random(seed))
    verify_orders(problem, incumbent)
    options = SearchOptions(effort=effort, without=("tune", "inject", "anneal"))
    plan = search(problem, options, incumbent=incumbent)
    verify(plan)
    assert plan.objective <= objective_of(problem, incumbent) * (1 + 1e-9)


HEURISTIC = Budget(2_000, 0.75, 4_000_000, 1_000, 5_600, 84, 400_000, 2_600, 0, 0.0, 0, 0.0)
WITH_CP_SAT = replace(HEURISTIC, window_actions=120, window_time=0.01, exact_actions=60, exact_time=0.01)


def test_thorough_begins_with_all_that_standard_does() -> None:
    problem = heavy(2, 4, 30.0)
    assert budgets_of("thorough", problem)[:1] == budgets_of("standard", problem)


def longer_does_no_harm(problem: Problem, budget: Budget) -> None:
    more = replace(budget, tuned=11_200, annealed=800_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zbv_solver.search.options.DIFFERING", {"standard": budget, "thorough": more})
        standard, thorough = (search(problem, SearchOptions(effort=each)) for each in BOTH)
    verify(thorough)
    assert thorough.objective <= standard.objective * (1 + 1e-9)
    assert thorough.metrics.lower_bound >= standard.metrics.lower_bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("p", "size"),
    [(3, [1.0, 3.0, 2.0, 2.0, 1.0, 2.0, 1.0, 3.0, 0.5]), (3, [0.0, 1.0, 3.0, 0.5, 0.0, 2.0, 2.0])],
)
def test_thorough_is_no_worse_where_its_budget_alone_finds_less(p: int, size: list[float]) -> None:
    """A larger budget leads random choices elsewhere."""
    longer_does_no_harm(with_sizes(uniform(p, len(size), limit=12.8, p2p=1), size), HEURISTIC)


@given(differing_problems(max_p=3, max_m=6))
@settings(max_examples=6)
def test_thorough_is_never_worse_than_standard(problem: Problem) -> None:
    longer_does_no_harm(problem, WITH_CP_SAT)


def test_cp_sat_proves_a_small_plan_optimal() -> None:
    problem = heavy(2, 4, 30.0)
    plan = search(problem, SearchOptions(without=("tune", "inject")))
    assert plan.metrics.status == "optimal"
    assert lower_bound(problem, "thorough").value < plan.metrics.lower_bound
    assert "CP-SAT" in prove_bound(plan, plan.metrics.lower_bound)


def test_a_plan_of_an_earlier_search_is_resumed_as_it_is() -> None:
    problem = heavy(4, 10, 24.0)
    plan = search(problem, QUICK)
    assert in_entry_order(plan.orders, problem.n_stages) == plan.orders
    again = search(problem, QUICK, incumbent=plan)
    assert again.objective <= plan.objective


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=12), st.floats(0, 1), st.integers(0, 99))
def test_a_mountain_is_a_permutation_that_rises_and_falls(size: list[float], peak: float, seed: int) -> None:
    order = mountain(np.array(size), peak)
    assert sorted(order.tolist()) == list(range(len(size)))
    row = np.array(size)[order]
    top = int(row.argmax())
    if len(set(size)) == len(size):
        assert (np.diff(row[: top + 1]) > 0).all()
        assert (np.diff(row[top:]) < 0).all()
        assert top == round(peak * (len(size) - 1))
    begin = seed % len(size)
    other = changed(order, np.random.default_rng(seed), begin)
    assert sorted(other.tolist()) == sorted(order.tolist())
    assert other[:begin].tolist() == order[:begin].tolist()


def test_equal_sizes_stay_in_ascending_order() -> None:
    assert mountain(sizes(uniform(2, 5)), 0.5).tolist() == [0, 1, 2, 3, 4]


def test_a_small_microbatch_must_not_take_what_a_large_one_still_needs() -> None:
    """The older microbatch needs 5 more for its second forward, so the younger one has to wait."""
    document = {
        "pp_degree": 2,
        "microbatches": 2,
        "features": {"size": [5, 3]},
        "costs": {"forward": {"size": 1}, "backward_input": {"size": 1}, "backward_weight": {"size": 1}},
        "memory": {
            "forward": {"size": 1},
            "backward_input": {"size": 0},
            "backward_weight": {"size": -1},
            "limit": 12,
        },
    }
    for limit, is_safe in ((12, False), (13, True)):
        document["memory"]["limit"] = limit  # type: ignore[index]
        problem = parse_problem(document)
        tables = make_tables(problem)
        board = Board.of(tables)
        board.level[:, 1] = tables.static
        place(tables, board, 0, F, 0.0)
        assert stays_safe(tables, board, 0, 0) == is_safe
        verify(search(problem, QUICK))


@pytest.mark.parametrize("effort", ["quick", "standard"])
def test_the_plan_may_be_chosen_for_jitter(effort: Any) -> None:
    """The search with longer latencies has a problem of its kind, too."""
    problem = heavy(2, 4, 30.0)
    jitter = parse_jitter("5%")
    plan = search_for_jitter(problem, SearchOptions(effort, without=("tune", "inject")), jitter=jitter)
    verify(plan)
    assert plan.simulation is not None
