"""Lower bounds, heads and tails against proven optima and random orders, tight memory included."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.problems import limited, limited_problems, uniform
from zbv_solver.bounds import lower_bound
from zbv_solver.bounds.directions import may_fuse
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.errors import InvalidPlan
from zbv_solver.improve.cp_search import refine
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import LETTERS, B, F, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate, span_start_times
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.windows import all_heads_and_tails

KINDS = ("v", "loop", "single")


def value_of(problem: Problem, orders: Orders) -> float:
    timing = evaluate(problem, orders)
    return timing.span if problem.objective == "span" else timing.makespan


@given(limited_problems(max_p=2, max_m=2, kinds=KINDS))
@settings(max_examples=20)
def test_never_above_the_proven_optimum(problem: Problem) -> None:
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.1)
    assume(result.proved)
    best = result.orders or start
    try:
        verify_orders(problem, best)
    except InvalidPlan:
        assume(False)
    assert lower_bound(problem, "thorough").value <= value_of(problem, best) * (1 + 1e-9) + 1e-9
    assert_inside(problem, best)


@given(limited_problems(max_p=4, max_m=5, kinds=KINDS), st.integers(0, 1000))
@settings(max_examples=100)
def test_every_random_order_respects_heads_and_tails(problem: Problem, seed: int) -> None:
    bound = lower_bound(problem, "thorough").value
    for orders in random_orders(problem, random.Random(seed), 4):
        verify_orders(problem, orders)
        assert bound <= value_of(problem, orders) * (1 + 1e-9) + 1e-9
        assert_inside(problem, orders)


@given(limited_problems(max_p=3, max_m=6), st.integers(0, 1000))
@settings(max_examples=15)
def test_no_climb_among_orders_gets_below(problem: Problem, seed: int) -> None:
    """Many random orders of the same problem, so that good ones are among them."""
    bound = lower_bound(problem, "thorough").value
    best = min(value_of(problem, orders) for orders in random_orders(problem, random.Random(seed), 60))
    assert bound <= best * (1 + 1e-9) + 1e-9


def test_proven_optima_that_memory_decides() -> None:
    """One microbatch at a time: every further one costs its whole path."""
    problem = limited(uniform(3, 4, objective="makespan"), 0.0)
    result = refine(problem, serial(problem).orders, lower_bound=0.0, effort=5.0)
    assert result.proved
    assert lower_bound(problem, effort="quick").value < result.lower_bound
    assert lower_bound(problem).value == pytest.approx(result.lower_bound)


@pytest.mark.parametrize(("backward_input", "weight", "optimum"), [(16, 4, 551), (14, 6, 527), (20, 10, 687)])
def test_a_span_knows_what_the_innermost_rank_does_in_it(
    backward_input: float, weight: float, optimum: float
) -> None:
    """It starts late, its last I comes early, and not all its W's can wait. CP-SAT proved the optima."""
    costs = {"forward": 10, "backward_input": backward_input, "backward_weight": weight, "p2p": 0.5}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16}
    problem = parse_problem({"pp_degree": 4, "microbatches": 8, "costs": costs, "memory": memory})
    assert 0.995 * optimum <= lower_bound(problem).value <= optimum


@pytest.mark.parametrize(
    ("m", "costs", "optimum"),
    [
        (
            2,
            {
                "forward": [9, 7, 9, 8],
                "backward_input": [4, 11, 14, 12],
                "backward_weight": [2, 8, 2, 3],
            },
            106,
        ),
        (1, {"forward": 8, "backward_input": 5, "backward_weight": 8, "p2p": 1}, 64),
    ],
)
def test_another_rank_may_work_before_the_window_and_both_ramps_may_overlap(
    m: int, costs: dict[str, object], optimum: float
) -> None:
    """Two optima that a first draft of the bound exceeded."""
    memory = {"forward": 2, "backward_input": 0, "backward_weight": -2}
    problem = parse_problem({"pp_degree": 2, "microbatches": m, "costs": costs, "memory": memory})
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=1.0)
    assert result.proved
    assert result.lower_bound == pytest.approx(optimum)
    assert lower_bound(problem).value <= optimum * (1 + 1e-9)


def test_a_small_chunk_next_to_a_large_one_counts_in_the_capacity() -> None:
    """Two cells of 0.3 fit next to one of 10,000,000.3, although the floats differ by less than 0.6."""
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, "p2p": 2}
    held = [0.3, 0, 0, 10_000_000.3]
    memory = {
        "forward": held,
        "backward_input": 0,
        "backward_weight": [-amount for amount in held],
        "limit": 10_000_000.9,
    }
    problem = parse_problem(
        {"pp_degree": 2, "microbatches": 3, "objective": "makespan", "costs": costs, "memory": memory}
    )
    result = refine(problem, serial(problem).orders, lower_bound=0.0, effort=1.0)
    assert result.orders is not None
    assert value_of(problem, result.orders) == 30
    assert lower_bound(problem).value <= 30 * (1 + 1e-9)


@given(limited_problems(max_p=3, max_m=4))
@settings(max_examples=20)
def test_less_memory_never_lowers_the_bound(problem: Problem) -> None:
    assert problem.memory.limit is not None
    more = replace(problem.memory, limit=tuple(limit + 4 for limit in problem.memory.limit))
    roomy = lower_bound(replace(problem, memory=more)).value
    assert roomy <= lower_bound(problem).value * (1 + 1e-9)


def assert_inside(problem: Problem, orders: Orders) -> None:
    """In the objective's window, every action starts at its head or later and ends before its tail."""
    least_head, least_tail = all_heads_and_tails(problem)
    orders = split_where_fusing_never_pays(problem, orders)
    spans = problem.objective == "span"
    start = span_start_times(problem, orders) if spans else evaluate(problem, orders).start
    end = start + problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
    slack = 1e-9 * (1 + end.max())
    letter = np.where(orders.letter == B, I, orders.letter)
    cell = letter, orders.stage, orders.microbatch
    for rank in range(problem.pp_degree):
        part = orders.slice_of(rank)
        window = part if spans else slice(None)
        opens, closes = start[window].min(), end[window].max()
        assert (start[part] - opens >= least_head[cell][part] - slack).all()
        assert (closes - end[part] >= least_tail[cell][part] - slack).all()


def split_where_fusing_never_pays(problem: Problem, orders: Orders) -> Orders:
    """The same order with I and W in place of every B that cannot pay, numbered in order."""
    pays = may_fuse(problem)
    ranks = [
        [
            (stage, letter, j)
            for stage, name, j in orders.actions(rank)
            for letter in ([I, W] if name == "B" and not pays[stage] else [LETTERS.index(name)])
        ]
        for rank in range(problem.pp_degree)
    ]
    return first_in_first_out(Orders.pack(ranks), problem.n_stages)


def random_orders(problem: Problem, chance: random.Random, count: int) -> Iterator[Orders]:
    """Orders that run anything that can run, now and then with a bias; stuck ones are dropped."""
    for _ in range(count):
        weights = {kind: chance.choice([0.1, 1.0, 1.0, 10.0]) for kind in range(4)}
        orders = _random_order(problem, chance, weights)
        if orders is not None:
            yield orders
    yield serial(problem).orders


def _random_order(problem: Problem, chance: random.Random, weights: dict[int, float]) -> Orders | None:
    arrays, n, m = problem.arrays, problem.n_stages, problem.microbatches
    held, peak = arrays.static.copy(), arrays.limit
    begun, back = [0] * n, [0] * n
    waiting: list[list[int]] = [[] for _ in range(n)]  # I's without their W
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.pp_degree)]
    for _ in range(3 * n * m):
        ready = []
        for stage in range(n):
            if begun[stage] < m and (stage == 0 or begun[stage] < begun[stage - 1]):
                ready.append((stage, F, begun[stage]))
            if back[stage] < begun[stage] and (stage == n - 1 or back[stage] < back[stage + 1]):
                ready += [(stage, I, back[stage]), (stage, B, back[stage])]
            if waiting[stage]:
                ready.append((stage, W, waiting[stage][0]))
        rank_of = problem.placement.rank_of
        fitting = [
            action
            for action in ready
            if not exceeds(
                held[rank_of[action[0]]] + max(0.0, arrays.delta[action[1], action[0], 0]),
                peak[rank_of[action[0]]],
            )
        ]
        if not fitting:
            break
        stage, letter, j = chance.choices(fitting, [weights[action[1]] for action in fitting])[0]
        held[rank_of[stage]] += arrays.delta[letter, stage, 0]
        ranks[rank_of[stage]].append((stage, letter, j))
        if letter == F:
            begun[stage] += 1
        elif letter == W:
            waiting[stage].pop(0)
        else:
            back[stage] += 1
            waiting[stage] += [j] if letter == I else []
    done = all(count == m for count in back) and not any(waiting)
    return Orders.pack(ranks) if done else None
