"""Copies laid over a given order, with pairs or without: the order keeps its pairs and the limits."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from support.orders import paired_at_random, random_orders
from support.problems import with_copies
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.copies import plan_copies
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Communication
from zbv_solver.timing.start_times import evaluate, objective_of
from zbv_solver.verify.verifier import verify_orders


def with_pairs(problem: Problem) -> Problem:
    """The problem, half of whose F's, I's and B's is communication."""
    costs = problem.costs
    forward, inputs = ([each / 2 for each in times] for times in (costs.forward, costs.backward_input))
    return replace(problem, communication=Communication(tuple(forward), tuple(inputs), tuple(inputs)))


@given(with_copies(), st.integers(0, 2**32), st.floats(0, 1))
def test_an_order_keeps_its_pairs_and_the_limits(problem: Problem, seed: int, share: float) -> None:
    problem, random = with_pairs(problem), Random(seed)
    orders = paired_at_random(random_orders(problem, random), random)
    try:
        most = evaluate(problem, orders).peak_memory
    except InvalidPlan:
        return  # the pairs deadlock
    limit = tuple(a + share * max(0.0, b - a) for a, b in zip(problem.smallest_limit, most, strict=True))
    limited = replace(problem, memory=replace(problem.memory, limit=limit))
    made = plan_copies(limited, orders)
    if made is None:
        return
    value, copied = made
    verify_orders(limited, copied)
    assert objective_of(limited, copied) == value
    pairs = [0 if each.paired is None else each.paired.sum() for each in (orders, copied)]
    assert pairs[0] == pairs[1]
    if share == 1:
        assert copied == orders
