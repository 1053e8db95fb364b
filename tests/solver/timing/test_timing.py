"""Timing against published vectors and slow references."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from random import Random
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.paths import ROOT
from support.problems import problems, uniform
from support.reference import largest_cycle_mean, makespan, peak_memory, reach, simulate, steady_period
from zbv_solver.construct.baselines import baseline
from zbv_solver.construct.dispatch import priority_schedules, serial
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing import sweeps
from zbv_solver.timing.start_times import (
    earliest_start_values,
    evaluate,
    memory_profile,
    span_start_times,
)

VECTORS = json.loads((ROOT / "tests/solver/timing/vectors.json").read_text())["vectors"]


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_published_vectors(vector: dict[str, Any]) -> None:
    problem, orders = parse_problem(vector["problem"]), Orders.from_text(vector["ranks"])
    timing, expected = evaluate(problem, orders), vector["expect"]
    assert timing.makespan == pytest.approx(expected["makespan"], rel=1e-12)
    assert timing.span == pytest.approx(expected["span"], rel=1e-12)
    assert timing.bubble_rate == pytest.approx(expected["bubble_rate"], abs=1e-12)
    assert list(timing.peak_memory) == pytest.approx(expected["peak_memory"], rel=1e-12)
    _, bound = earliest_start_values(problem, orders)
    assert bound == pytest.approx(expected["earliest_start_span"], rel=1e-12)


@given(problems(max_p=4, max_m=4))
def test_times_and_memory_equal_a_plain_simulation(problem: Problem) -> None:
    orders = some_orders(problem)
    timing, times = evaluate(problem, orders), simulate(problem, orders)[0]
    for rank in range(problem.pp_degree):
        part = orders.slice_of(rank)
        for action, start, end in zip(
            orders.actions(rank), timing.start[part], timing.end[part], strict=True
        ):
            assert times[action] == (start, end)
    assert timing.makespan == makespan(problem, orders)
    assert list(timing.peak_memory) == pytest.approx(peak_memory(problem, orders))


@given(problems(max_p=4, max_m=3))
def test_the_span_is_the_period_of_consecutive_iterations(problem: Problem) -> None:
    """The definition, simulated: unrolled iterations settle at one span each.

    With a critical cycle through k ranks, the period shows over multiples of k iterations. 120 and 60 are
    multiples of all cycle lengths that are possible here, 1 to 4.
    """
    orders = some_orders(problem)
    assert evaluate(problem, orders).span == pytest.approx(steady_period(problem, orders, 120), rel=1e-9)


@given(problems(max_p=6, max_m=6, kinds=("v", "loop", "single")), st.integers(0, 2**32))
def test_span_is_the_largest_cycle_mean_of_all_paths(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    expected = largest_cycle_mean(reach(problem, orders))
    assert evaluate(problem, orders).span == pytest.approx(expected, rel=1e-12)


def test_random_orders_include_spans_below_those_of_earliest_starts() -> None:
    """Otherwise tests with random orders would prove little."""
    below = 0
    for seed in range(40):
        random = Random(seed)
        costs = {kind: [random.randint(0, 20) for _ in range(12)] for kind in ("forward", "backward_input")}
        problem = parse_problem(
            {"pp_degree": 6, "microbatches": 5, "costs": {**costs, "backward_weight": costs["forward"]}}
        )
        orders = random_orders(problem, random)
        below += evaluate(problem, orders).span < earliest_start_values(problem, orders)[1] * (1 - 1e-9)
    assert below >= 3


@given(
    st.integers(1, 9).flatmap(
        lambda p: st.tuples(
            st.lists(st.lists(st.integers(0, 100), min_size=p, max_size=p), min_size=p, max_size=p),
            st.lists(st.integers(0, 300), min_size=p, max_size=p),
        )
    )
)
def test_policy_iteration_finds_the_largest_cycle_mean_of_any_matrix(
    case: tuple[list[list[int]], list[int]],
) -> None:
    """Cycles through several ranks are rare in real orders, but common in matrices."""
    weight, guess = case
    release = np.array(guess, dtype=np.float64)
    span = sweeps.policy_iteration(graph_of(weight), release, ROUNDING)
    assert span == pytest.approx(largest_cycle_mean(weight), rel=1e-12)
    assert np.all(release[:, None] + np.array(weight) - span <= release[None, :] + 1e-9)


def graph_of(weight: Sequence[Sequence[float]]) -> sweeps.Graph:
    """A graph whose longest paths are a matrix: rank q gathers one path of each length weight[r][q].

    A rank's first action takes no time and feeds the other p - 1 ranks. Its second takes weight[q][q]. The
    others take no time and wait for one rank each. Every action has its own costs.
    """
    p = len(weight)
    firsts = [rank * (p + 1) for rank in range(p)]
    source = np.full(p * (p + 1), -1, dtype=np.int32)
    duration, latency = np.zeros(p * (p + 1)), np.full(p * (p + 1), -1.0)
    for q, at in enumerate(firsts):
        duration[at + 1] = weight[q][q]
        for place, r in enumerate((r for r in range(p) if r != q), start=at + 2):
            source[place], latency[place] = firsts[r], weight[r][q]
    runs = np.array(
        [(q, at + 1) for q, at in enumerate(firsts)] + [(q, at + p + 1) for q, at in enumerate(firsts)],
        dtype=np.int32,
    )
    return sweeps.Graph(source, np.array([*firsts, p * (p + 1)]), duration, latency, runs)


@given(problems(max_p=4, max_m=4), st.integers(0, 2**32))
def test_span_start_times_fit_every_window(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    span = evaluate(problem, orders).span
    start = span_start_times(problem, orders)
    end = start + problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
    first, last = orders.offset[:-1], orders.offset[1:] - 1
    rounding = 1e-9 * float(end.max())
    assert np.all(end[last] - start[first] <= span + rounding)
    assert np.all(start >= evaluate(problem, orders).start - rounding)
    assert start.min() == 0
    for rank in range(problem.pp_degree):
        part = orders.slice_of(rank)
        assert np.all(start[part][1:] >= end[part][:-1] - rounding)


@given(problems(max_p=4, max_m=4), st.integers(0, 2**32))
def test_earliest_start_values(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    times = simulate(problem, orders)[0]
    windows = [
        times[actions[-1]][1] - times[actions[0]][0]
        for actions in (orders.actions(rank) for rank in range(problem.pp_degree))
    ]
    assert earliest_start_values(problem, orders) == (makespan(problem, orders), max(windows))


@given(problems(max_p=4, max_m=4))
def test_spans_are_ordered(problem: Problem) -> None:
    orders = some_orders(problem)
    timing = evaluate(problem, orders)
    busiest = max(
        problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)[orders.slice_of(rank)].sum()
        for rank in range(problem.pp_degree)
    )
    assert busiest <= timing.span * (1 + 1e-12) <= earliest_start_values(problem, orders)[1] * (1 + 2e-12)
    assert timing.span <= timing.makespan * (1 + 1e-12)


def test_memory_profile_counts_growth_while_an_action_runs() -> None:
    problem = uniform(1, 1)
    orders = Orders.from_text([["0F0", "1F0", "1I0", "1W0", "0B0"]])
    during, after = memory_profile(problem, orders)
    assert during.tolist() == [1, 2, 2, 1.5, 1]
    assert after.tolist() == [1, 2, 1.5, 1, 0]


def test_a_deadlock_is_reported_with_ranks_and_actions() -> None:
    ranks = [["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "2B0", "1B0"]]
    with pytest.raises(InvalidPlan, match=r"deadlocks.*rank 0 at 3F0.*rank 1 at 2F0"):
        evaluate(uniform(2, 1), Orders.from_text(ranks))


def test_an_order_with_an_empty_rank_can_be_timed() -> None:
    timing = evaluate(uniform(2, 1), Orders.from_text([["0F0"], []]))
    assert (timing.makespan, timing.span, timing.peak_memory) == (1, 1, (1, 0))
    nothing = evaluate(uniform(2, 1), Orders.from_text([[], []]))
    assert (nothing.makespan, nothing.span, nothing.bubble_rate) == (0, 0, 0)
    assert span_start_times(uniform(2, 1), Orders.from_text([[], []])).tolist() == []


def test_rounding_makes_no_negative_bubble() -> None:
    costs = {"forward": 0.3, "backward_input": 0.6, "backward_weight": 0.3}
    document = {"pp_degree": 1, "microbatches": 4, "placement": "single", "costs": costs}
    assert evaluate(*baseline("1f1b", parse_problem(document))).bubble_rate == 0


@pytest.mark.parametrize("action", [(4, "F", 0), (-1, "F", 0), (0, "F", 1), (0, "F", -1)])
def test_an_action_out_of_range_is_reported(action: tuple[int, str, int]) -> None:
    with pytest.raises(InvalidPlan, match="found {}{}{};".format(*action)):
        evaluate(uniform(2, 1), Orders.from_actions([[(0, "F", 0), action], []]))


def some_orders(problem: Problem) -> Orders:
    """A valid order that is not optimal."""
    attempts = [*get_v_schedule(problem), *priority_schedules(problem, (0.5,))]
    return attempts[len(attempts) // 2].orders


def test_executing_takes_steps_in_proportion_to_the_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with one microbatch in flight, when all ranks but one always wait."""
    kernel, lines = cast(Any, sweeps.execute).py_func, 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code is kernel.__code__ else None

    def counted(*arguments: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(count)
        try:
            return kernel(*arguments)
        finally:
            sys.settrace(before)

    def lines_per_action(p: int) -> float:
        nonlocal lines
        orders, lines = serial(uniform(p, 3)).orders, 0
        earliest_start_values(uniform(p, 3), orders)
        return lines / len(orders)

    monkeypatch.setattr(sweeps, "execute", counted)
    assert lines_per_action(32) < 1.2 * lines_per_action(8)
