"""Lower bounds: below every order, equal to proven optima where load, paths or memory decide."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count, islice
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.orders import fitting_orders
from support.problems import limited, limited_problems, problems, rough_problems, uniform
from support.reference import all_orders_of_one_microbatch
from zbv_solver.bounds import few_ranks, lower_bound
from zbv_solver.bounds.directions import may_fuse
from zbv_solver.bounds.few_ranks import FewRanks, few_ranks_bound
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.improve.cp_search import refine
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import LETTERS, B, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate, objective_of, span_start_times
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.windows import all_heads_and_tails

KINDS = ("v", "loop", "single")
HALVES = {"forward": 2, "backward_input": -1, "backward_weight": -1}
AT_THE_END = {"forward": 2, "backward_input": 0, "backward_weight": -2}
PAIRS = 300_000


def problem_of(p: int, m: int, costs: dict[str, Any], memory: dict[str, Any], **more: Any) -> Problem:
    return parse_problem({"pp_degree": p, "microbatches": m, "costs": costs, "memory": memory, **more})


def costs(forward: Any, backward_input: Any, backward_weight: Any, p2p: float = 0) -> dict[str, Any]:
    return {
        "forward": forward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
        "p2p": p2p,
    }


def tight(m: int, **more: Any) -> Problem:
    return problem_of(4, m, costs(18, 18, 12, 1), HALVES | {"limit": 8}, **more)


PROVEN: dict[str, tuple[Problem, float, float]] = {
    # 8 F, 8 I, 6 transfers each way, and the last W.
    "path of one microbatch": (uniform(4, 1, p2p=2), 41, 1),
    "load": (uniform(4, 16), 96, 1),
    # Rank 3's first input comes after 3 F, so it ends no earlier than 3 + 6 m.
    "first input and last gradient": (uniform(4, 16, objective="makespan"), 99, 1),
    # Every further microbatch costs its whole path.
    "one microbatch at a time": (limited(uniform(3, 4, objective="makespan"), 0.0), 43, 1),
    # The innermost rank starts late, its last I comes early, and not all its W's can wait.
    "late innermost rank": (problem_of(4, 8, costs(10, 16, 4, 0.5), HALVES | {"limit": 16}), 551, 0.995),
    "shorter backwards": (problem_of(4, 8, costs(10, 14, 6, 0.5), HALVES | {"limit": 16}), 527, 0.995),
    "longer backwards": (problem_of(4, 8, costs(10, 20, 10, 0.5), HALVES | {"limit": 16}), 687, 0.995),
    "another rank works before the window": (
        problem_of(2, 2, costs([9, 7, 9, 8], [4, 11, 14, 12], [2, 8, 2, 3]), AT_THE_END),
        106,
        0.9,
    ),
    "both ramps overlap": (problem_of(2, 1, costs(8, 5, 8, 1), AT_THE_END), 64, 0.9),
    # Two cells of 0.3 fit next to one of 10,000,000.3, although the floats differ by less than 0.6.
    "a small chunk next to a large one": (
        problem_of(
            2,
            3,
            costs(1, 1, 1, 2),
            {
                "forward": [0.3, 0, 0, 10_000_000.3],
                "backward_input": 0,
                "backward_weight": [-0.3, 0, 0, -10_000_000.3],
                "limit": 10_000_000.9,
            },
            objective="makespan",
        ),
        30,
        0.8,
    ),
}
"""Problems with optima that CP-SAT proved, and the least share of it that the bound reaches."""


@pytest.mark.parametrize("name", PROVEN)
def test_a_bound_is_close_to_a_proven_optimum_and_not_above(name: str) -> None:
    problem, optimum, share = PROVEN[name]
    assert share * optimum * (1 - 1e-9) <= lower_bound(problem).value <= optimum * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_two_ranks_have_the_optimum_where_memory_is_tight(objective: str) -> None:
    """CP-SAT proved 1068, 1516 and 1964 for the makespan of 8, 12 and 16 microbatches: 112 each."""
    problems = [tight(m, objective=objective) for m in (8, 12, 16, 4000)]
    values = [lower_bound(problem, "thorough").value for problem in problems]
    assert values == [1068, 1516, 1964, 1964 + 112 * 3984]


def test_an_empty_ramp_of_a_long_run_is_seen() -> None:
    """Only the ends of a long run are looked at; what memory costs there is there at any length."""
    runs = [uniform(8, m, limit=12, objective="makespan") for m in (64, 2000)]
    gains = [lower_bound(run).value - lower_bound(run, "quick").value for run in runs]
    assert gains[0] == pytest.approx(gains[1], rel=1e-9)
    assert gains[0] > 0


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


@given(limited_problems(max_p=5, max_m=8, kinds=KINDS))
def test_a_bound_is_between_those_of_less_effort_and_constructed_orders(problem: Problem) -> None:
    quick, full = (lower_bound(problem, effort).value for effort in ("quick", "full"))
    load = max(problem.busy_time(rank) for rank in range(problem.pp_degree))
    assert max(quick, load * (1 - 1e-12)) <= full
    assert all(full <= attempt.value * (1 + 1e-9) + 1e-9 for attempt in priority_schedules(problem))


@given(limited_problems(max_p=2, max_m=2, kinds=KINDS))
@settings(max_examples=20)
def test_never_above_the_proven_optimum(problem: Problem) -> None:
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.1)
    assume(result.proved)
    assert_keeps_all_bounds(problem, result.orders or start)


@given(limited_problems(max_p=4, max_m=5, kinds=KINDS), st.integers(0, 1000))
@settings(max_examples=100)
def test_every_random_order_keeps_all_bounds(problem: Problem, seed: int) -> None:
    for orders in fitting_orders(problem, Random(seed), 4):
        verify_orders(problem, orders)
        assert_keeps_all_bounds(problem, orders)


def assert_keeps_all_bounds(problem: Problem, orders: Orders) -> None:
    """In the objective's window, every action starts at its head or later and ends before its tail."""
    assert lower_bound(problem, "thorough").value <= objective_of(problem, orders) * (1 + 1e-9) + 1e-9
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


@given(limited_problems(max_p=3, max_m=4))
@settings(max_examples=20)
def test_less_memory_never_lowers_the_bound(problem: Problem) -> None:
    assert problem.memory.limit is not None
    more = replace(problem.memory, limit=tuple(limit + 4 for limit in problem.memory.limit))
    roomy = lower_bound(replace(problem, memory=more)).value
    assert roomy <= lower_bound(problem).value * (1 + 1e-9)


def set_of_ranks(problem: Problem, chosen: int) -> tuple[int, ...]:
    """A set that is not empty."""
    ranks = tuple(rank for rank in range(problem.pp_degree) if chosen >> rank & 1)
    return ranks or (problem.pp_degree - 1,)


def bound_of(problem: Problem, ranks: tuple[int, ...]) -> float:
    few = FewRanks.of(problem, ranks)
    return 0.0 if few is None else few_ranks_bound(few, problem.microbatches, PAIRS)[0]


@given(st.one_of(limited_problems(max_p=3, max_m=4, kinds=KINDS), rough_problems()), st.integers(0, 7))
@settings(max_examples=25)
def test_no_constructed_order_is_better_than_a_few_ranks_allow(problem: Problem, chosen: int) -> None:
    best = min(objective_of(problem, attempt.orders) for attempt in islice(priority_schedules(problem), 3))
    assert bound_of(problem, set_of_ranks(problem, chosen)) <= best * (1 + 1e-9)


@given(limited_problems(max_p=2, max_m=3, kinds=KINDS), st.integers(0, 3))
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])
def test_all_ranks_have_the_optimum_and_fewer_never_more(problem: Problem, chosen: int) -> None:
    problem = replace(problem, objective="makespan", costs=replace(problem.costs, backward=None))
    assume(not may_fuse(problem).any())
    start = next(priority_schedules(problem)).orders
    result = refine(problem, start, lower_bound=0.0, effort=0.1)
    assume(result.proved)
    optimum = objective_of(problem, result.orders or start)
    assert bound_of(problem, set_of_ranks(problem, chosen)) <= optimum * (1 + 1e-9)
    whole = bound_of(problem, tuple(range(problem.pp_degree)))
    assert whole == 0.0 or whole == pytest.approx(optimum, rel=1e-8)


@given(limited_problems(max_p=3, max_m=2), st.integers(1, 7), st.integers(10, 30))
@settings(max_examples=20)
def test_the_steady_state_is_no_more_than_every_layer_would_give(
    problem: Problem, chosen: int, m: int
) -> None:
    few = FewRanks.of(problem, set_of_ranks(problem, chosen))
    assume(few is not None)
    assert few is not None
    with pytest.MonkeyPatch.context() as patch:
        exact, early = (few_ranks_bound(few, m, pairs)[0] for pairs in (PAIRS, PAIRS // 50))
        patch.setattr(few_ranks, "_repeats", lambda *_: (0, 0))
        patch.setattr(few_ranks, "_best_shift", lambda *_: (0, 0))
        layers = few_ranks_bound(few, m, 10 * PAIRS)[0]
    assume(layers > 0)
    assert max(early, exact) <= layers * (1 + 1e-12)


def test_few_ranks_are_tried_only_where_memory_is_a_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_ranks, "few_ranks_bounds", lambda *_: iter([((3,), math.inf)]))
    for problem, is_tried in (
        (uniform(4, 8, limit=8), False),
        (uniform(4, 8), False),
        (limited(uniform(4, 8), 0.0), True),
    ):
        assert (lower_bound(problem, "thorough").value == math.inf) == is_tried


def test_too_few_pairs_prove_nothing() -> None:
    few = FewRanks.of(tight(8), (2, 3))
    assert few is not None
    value, used = few_ranks_bound(few, 8, 1000)
    assert value == 0.0
    assert used < 2000
    assert np.isclose(few_ranks_bound(few, 8, PAIRS)[0], 1068)


def test_a_stopped_bound_is_the_best_so_far() -> None:
    problem, asked = tight(8), count()
    stopped = lower_bound(problem, "thorough", is_stopped=lambda: next(asked) >= 20)
    assert next(asked) < 30, "it goes on after the stop"
    known = lower_bound(problem).value
    assert known <= stopped.value < lower_bound(problem, "thorough").value
    assert lower_bound(problem, "thorough", is_stopped=lambda: True).value == known


@pytest.mark.parametrize("p2p", [0, 3])
def test_ranks_without_work_have_a_bound(p2p: float) -> None:
    problem = problem_of(4, 8, costs(0, 0, 0, p2p), HALVES | {"limit": 8})
    assert 0.0 <= lower_bound(problem, "thorough").value <= serial(problem).value
