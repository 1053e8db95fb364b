"""Timing and simulated iterations, against slow references."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import in_other_units, problems, uniform
from support.reference import Times, largest_cycle_mean, peak_memory, reach, simulate
from zbv_solver.construct.baselines import baseline
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.jitter import Jitter, draw
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import LETTERS, Problem
from zbv_solver.timing import start_times
from zbv_solver.timing.step_times import WARM_UP, iteration_times

SEEDS = st.integers(0, 2**32)


@given(problems(max_p=4, max_m=4, kinds=("v", "loop", "single")), SEEDS)
def test_times_and_memory_equal_a_plain_simulation(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    timing, times, peaks = start_times.evaluate(problem, orders), simulate(problem, orders)[0], []
    during, after = start_times.memory_profile(problem, orders)
    windows = []
    for rank in range(problem.pp_degree):
        part, plain = orders.slice_of(rank), [times[action] for action in orders.actions(rank)]
        pairs = zip(timing.start[part].tolist(), timing.end[part].tolist(), strict=True)
        assert list(pairs) == plain
        windows.append(plain[-1][1] - plain[0][0])
        peaks.append(during[part].max())
        assert after[part][-1] == pytest.approx(problem.memory.static[rank])
    assert timing.makespan == last_end(times) - min(start for start, _ in times.values())
    assert start_times.earliest_start_values(problem, orders) == (timing.makespan, max(windows))
    assert list(timing.peak_memory) == pytest.approx(peak_memory(problem, orders)) == peaks


def last_end(times: Times) -> float:
    return max(end for _, end in times.values())


@given(problems(max_p=6, max_m=6, kinds=("v", "loop", "single")), SEEDS)
def test_the_span_is_the_largest_cycle_mean_and_start_times_attain_it(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    timing, start = start_times.evaluate(problem, orders), start_times.span_start_times(problem, orders)
    assert timing.span == pytest.approx(largest_cycle_mean(reach(problem, orders)), rel=1e-12)
    end = start + problem.arrays.durations(orders.stage, orders.letter, orders.microbatch)
    first, last = orders.offset[:-1], orders.offset[1:] - 1
    rounding = 1e-9 * float(end.max())
    assert np.all(end[last] - start[first] <= timing.span + rounding)
    assert np.all(start >= timing.start - rounding)
    assert start.min() == 0
    for part in map(orders.slice_of, range(problem.pp_degree)):
        assert np.all(start[part][1:] >= end[part][:-1] - rounding)


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_policy_iteration_finds_the_largest_cycle_mean_of_any_matrix(p: int, seed: int) -> None:
    """Cycles through several ranks are rare in real orders, but common in matrices."""
    random = np.random.default_rng(seed)
    weight = random.integers(0, 101, (p, p)).tolist()
    release = random.integers(0, 301, p).astype(np.float64)
    span = start_times.policy_iteration(graph_of(weight), release, ROUNDING)
    assert span == pytest.approx(largest_cycle_mean(weight), rel=1e-12)
    assert np.all(release[:, None] + np.array(weight) - span <= release[None, :] + 1e-9)


def graph_of(weight: Sequence[Sequence[float]]) -> start_times.Graph:
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
    offset = np.array([*firsts, p * (p + 1)])
    stops = np.array([(q, at + length) for length in (1, p + 1) for q, at in enumerate(firsts)], np.int32)
    return start_times.Graph(source, offset, duration, latency, stops, p)


@pytest.mark.parametrize(("ranks", "says"), [
    ([["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "2B0", "1B0"]], r"rank 0 at 3F0, rank 1 at 2F0"),
    ([["0F0", "4F0"], []], "found 4F0; the problem has 4 stages and 1 microbatches"),
    ([["0F0"]], "found 1 ranks; the problem has 2"),
])  # fmt: skip
def test_orders_that_cannot_be_executed_are_refused(ranks: list[list[str]], says: str) -> None:
    with pytest.raises(InvalidPlan, match=says):
        start_times.evaluate(uniform(2, 1), Orders.from_text(ranks))


def test_orders_with_empty_ranks_can_be_timed() -> None:
    for first, length in (["0F0"], 1), ([], 0):
        orders = Orders.from_text([first, []])
        timing = start_times.evaluate(uniform(2, 1), orders)
        assert (timing.makespan, timing.span, timing.peak_memory) == (length, length, (length, 0))
        assert timing.bubble_rate == length / 2
        assert start_times.span_start_times(uniform(2, 1), orders).tolist() == [0.0] * length
    # Rounding makes no negative bubble.
    assert start_times.evaluate(*baseline("1f1b", in_other_units(uniform(1, 4), 0.3, 1.0))).bubble_rate == 0


NOISY = Jitter.of(0.3, 0.5, 0.2)


@given(problems(max_p=3, max_m=4), st.integers(0, 2**16))
def test_without_jitter_iterations_settle_at_the_exact_span(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    exact = start_times.evaluate(problem, orders)
    times = iteration_times(problem, orders, Jitter(), scenarios=32, seed=0)
    assert times.makespan == pytest.approx(exact.makespan, rel=1e-9, abs=1e-9)
    assert times.span.max() <= exact.span * (1 + 1e-9)
    # With a critical cycle through k ranks, the period shows over multiples of k iterations.
    settled = iteration_times(problem, orders, Jitter(), scenarios=16 * 120, seed=0).span[::16][60:]
    assert settled.mean() == pytest.approx(exact.span, rel=1e-9)
    for scenarios in (0, 100_001):
        with pytest.raises(InvalidInput, match="/scenarios"):
            iteration_times(problem, orders, Jitter(), scenarios=scenarios, seed=0)


@given(problems(max_p=3, max_m=4), st.integers(0, 2**16))
def test_iterations_equal_a_plain_simulation(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    alone = [plain_ends(problem, orders, seed, 1, first=k)[0] for k in range(WARM_UP + 3)]
    found = iteration_times(problem, orders, NOISY, scenarios=16 * 3, seed=seed).makespan[::16]
    assert found == pytest.approx(alone[WARM_UP:], rel=1e-9, abs=1e-9)


def test_back_to_back_iterations_of_coupled_ranks_equal_a_plain_simulation() -> None:
    problem = uniform(3, 6, p2p=0.5)
    orders = random_orders(problem, Random(3))
    found = iteration_times(problem, orders, NOISY, scenarios=16 * 40, seed=5).span[::16]
    ends = plain_ends(problem, orders, 5, WARM_UP + 40)
    assert found[5:] == pytest.approx(np.diff(ends)[WARM_UP + 4 :], rel=1e-9)


def plain_ends(problem: Problem, orders: Orders, seed: int, iterations: int, first: int = 0) -> list[float]:
    """Last ends of iterations of the first chain; ranks begin the first one together."""
    draws = [draw(NOISY, problem, seed, [0], first + k) for k in range(iterations)]
    m, n, rank_of = problem.microbatches, problem.n_stages, problem.placement.rank_of

    def factors(k: int, action: Action) -> tuple[float, float]:
        stage, letter, j = action
        row = (LETTERS.index(letter) * n + stage) * m + j
        way = (0 if letter == "F" else n) + stage
        longer = draws[k].action[row, 0] * draws[k].rank[rank_of[stage], 0]
        return longer, draws[k].transfer[way * m + j, 0]

    return [last_end(times) for times in simulate(problem, orders, iterations, factors)]
