"""The annealing of orders with copies to the host: exact times, memory limits, few copies, shorter orders."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import copied_at_random, random_orders
from support.problems import uniform, with_copies
from zbv_solver.construct.baselines import OFFLOADED
from zbv_solver.improve.copied_order import Costs, Lists, Run, execute
from zbv_solver.improve.copy_search import anneal_copies
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import compare
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate, objective_of
from zbv_solver.verify.verifier import verify_orders


@given(with_copies(), st.integers(0, 2**32), st.floats(0, 1))
def test_what_an_execution_says_is_what_the_order_with_its_copies_does(
    problem: Problem, seed: int, share: float
) -> None:
    random = Random(seed)
    orders = copied_at_random(random_orders(problem, random), random)
    peaks = evaluate(problem, orders).peak_memory
    limit = tuple(a + share * (b - a) for a, b in zip(problem.smallest_limit, peaks, strict=True))
    problem = replace(problem, memory=replace(problem.memory, limit=limit), objective="makespan")
    lists = Lists.of(problem, orders)
    run = Run.of(problem, lists)
    value = execute(Costs.of(problem), lists, run)
    made = lists.orders(problem, orders)
    assert made.without_copies() == orders.without_copies()
    if run.totals[0] == 0:
        verify_orders(problem, made)
        assert objective_of(problem, made) == pytest.approx(value, rel=1e-9, abs=1e-9)
    else:
        assert value > objective_of(problem, made)


@given(with_copies(), st.integers(0, 2**32), st.floats(0, 1))
def test_annealed_orders_keep_the_limits_and_get_shorter(problem: Problem, seed: int, share: float) -> None:
    random = Random(seed)
    orders = random_orders(problem, random)
    most = evaluate(problem, orders).peak_memory
    limit = tuple(a + share * max(0.0, b - a) for a, b in zip(problem.smallest_limit, most, strict=True))
    problem = replace(problem, memory=replace(problem.memory, limit=limit))
    found = list(anneal_copies(problem, orders, rounds=3, moves=200, seed=seed % 1000))
    for value, made in found:
        verify_orders(problem, made)
        assert objective_of(problem, made) == value
    if share == 1:
        assert found
    assert list(map(_text, found)) == list(
        map(_text, anneal_copies(problem, orders, rounds=3, moves=200, seed=seed % 1000))
    )


def _text(found: tuple[float, Orders]) -> tuple[float, list[list[str]]]:
    return found[0], found[1].all_text()


def test_an_order_of_more_memory_becomes_one_that_fits() -> None:
    costs = {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1, "offload": 12}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1}

    def problem(limit: float) -> Problem:
        return parse_problem(
            {"pp_degree": 4, "microbatches": 12, "costs": costs, "memory": memory | {"limit": limit}}
        )

    whole, small = problem(16), problem(16 * 0.4)
    first = search(whole.without_copies(), SearchOptions("quick"))
    *_, (value, orders) = anneal_copies(small, first.orders, rounds=4, moves=5_000, seed=0)
    verify_orders(small, orders)
    assert value < 1.05 * first.objective
    assert search(small.without_copies(), SearchOptions("quick")).objective > 1.3 * first.objective
    assert orders.copies is not None
    assert len(orders.copies) // 3 < 8 * 12
    # The host may have less room than that.
    assert small.copies is not None
    narrow = replace(small, copies=replace(small.copies, host_limit=(12.0,) * 4))
    *_, (longer, few) = anneal_copies(narrow, orders, rounds=4, moves=5_000, seed=0)
    verify_orders(narrow, few)
    assert longer > value
    # With room for all, the same search ends without copies.
    *_, (value, orders) = anneal_copies(whole, first.orders, rounds=1, moves=2_000, seed=0)
    assert (orders.copies, math.isclose(value, first.objective)) == (None, True)


def test_a_copy_in_that_is_due_before_its_forward_waits_for_it() -> None:
    """The backward of microbatch 0 has its copy back already, so it waits for no other one."""
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 0, "offload": 0, "reload": 3}
    memory = {"forward": 1, "backward_input": -1, "backward_weight": 0}
    document = {"pp_degree": 1, "microbatches": 4, "placement": "single", "costs": costs, "memory": memory}
    problem = parse_problem(document)
    order = [(0, letter, j) for letter, j in ((F, 0), (F, 1), (F, 2), (I, 0), (F, 3), (I, 3), (I, 1), (I, 2))]
    orders = Orders.of_rows([np.array([*order, *((0, W, j) for j in range(4))], np.int32)])
    lists = Lists.of(problem, orders)
    lists.copied[[0, 3]] = True
    verify_orders(problem, lists.orders(problem, orders))


def test_where_memory_holds_two_activations_the_order_is_the_best_one() -> None:
    """CP-SAT finds no shorter one (tests/support/best_orders.py)."""
    costs = {"forward": 3, "backward_input": 3, "backward_weight": 2, "p2p": 1, "offload": 3}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 4}
    document = {"pp_degree": 2, "microbatches": 4, "costs": costs, "memory": memory}
    assert search(parse_problem(document), SearchOptions("standard")).objective == 73


@pytest.mark.parametrize("p", [8, 16])
@pytest.mark.parametrize("copying", [12, 24])
def test_a_plan_is_shorter_than_fixed_rules_in_the_same_memory(p: int, copying: int) -> None:
    """However little memory a rule for copies needs, even a quick search knows what copies free."""
    costs = {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1, "offload": copying}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1}
    rules = {row.name: row for row in compare(uniform(p, 4 * p, costs=costs, memory=memory))}
    for name in OFFLOADED:
        limit = max(rules[name].peak_memory)
        problem = uniform(p, 4 * p, costs=costs, memory=memory | {"limit": limit})
        assert search(problem, SearchOptions(effort="quick")).metrics.span < rules[name].span
