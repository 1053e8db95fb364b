"""Simulated iterations, compared with exact spans and with a plain simulation."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems, uniform
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.jitter import Jitter, draw
from zbv_solver.problem.problem import LETTERS, Problem
from zbv_solver.timing.start_times import evaluate
from zbv_solver.timing.step_times import WARM_UP, iteration_times, rehearsed_times

NOISY = Jitter.of(0.3, 0.5, 0.2)


@given(problems(max_p=3, max_m=4), st.integers(0, 2**16))
def test_without_jitter_no_iteration_takes_longer_than_the_exact_span(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    times, exact = iteration_times(problem, orders, Jitter(), scenarios=32, seed=0), evaluate(problem, orders)
    assert times.makespan == pytest.approx(exact.makespan, rel=1e-9, abs=1e-9)
    assert times.span.max() <= exact.span * (1 + 1e-9)


def test_without_jitter_iterations_of_coupled_ranks_take_the_exact_span() -> None:
    problem = uniform(3, 6, p2p=0.5)
    orders = random_orders(problem, Random(3))
    times = iteration_times(problem, orders, Jitter(), scenarios=16 * 60, seed=0)
    assert times.span[-16 * 12 :].mean() == pytest.approx(evaluate(problem, orders).span)


@given(problems(max_p=3, max_m=4), st.integers(0, 2**16))
def test_iterations_equal_a_plain_simulation(problem: Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    alone = [plain_ends(problem, orders, seed, 1, first=k)[0] for k in range(WARM_UP + 3)]
    found = iteration_times(problem, orders, NOISY, scenarios=16 * 3, seed=seed).makespan[::16]
    assert found == pytest.approx(alone[WARM_UP:], rel=1e-9, abs=1e-9)
    rehearsed = rehearsed_times(problem, orders, NOISY, iterations=3, seed=seed)
    ends = [0.0, *plain_ends(problem, orders, seed, 3)]
    assert rehearsed.span == pytest.approx(np.diff(ends), rel=1e-9, abs=1e-9)
    assert rehearsed.makespan == pytest.approx(alone[:3], rel=1e-9, abs=1e-9)


def plain_ends(problem: Problem, orders: Orders, seed: int, iterations: int, first: int = 0) -> list[float]:
    """Last ends of iterations of the first chain, action by action; ranks begin the first one together."""
    arrays, m, n = problem.arrays, problem.microbatches, problem.n_stages
    clock, last = [0.0] * problem.pp_degree, []
    for iteration in range(first, first + iterations):
        draws = draw(NOISY, problem, seed, [0], iteration)
        ended: dict[tuple[int, bool, int], float] = {}
        queues = [orders.actions(rank) for rank in range(problem.pp_degree)]
        while any(queues):
            for rank, queue in enumerate(queues):
                while queue:
                    stage, letter, j = queue[0]
                    code, is_forward = LETTERS.index(letter), letter == "F"
                    source, ready = (stage - 1 if is_forward else stage + 1, is_forward, j), clock[rank]
                    if letter != "W" and 0 <= source[0] < n:
                        if source not in ended:
                            break
                        boundary = min(stage, source[0])
                        row = (stage if is_forward else n + stage) * m + j
                        ready = max(
                            ready, ended[source] + arrays.latency[boundary, 0] * draws.transfer[row, 0]
                        )
                    factor = draws.action[(code * n + stage) * m + j, 0] * draws.rank[rank, 0]
                    clock[rank] = ready + arrays.duration[code, stage, 0] * factor
                    if letter != "W":
                        ended[stage, is_forward, j] = clock[rank]
                    queue.pop(0)
        last.append(max(clock))
    return last


def test_back_to_back_iterations_of_coupled_ranks_equal_a_plain_simulation() -> None:
    problem = uniform(3, 6, p2p=0.5)
    orders = random_orders(problem, Random(3))
    found = iteration_times(problem, orders, NOISY, scenarios=16 * 40, seed=5).span[::16]
    ends = plain_ends(problem, orders, 5, WARM_UP + 40)
    assert found[5:] == pytest.approx(np.diff(ends)[WARM_UP + 4 :], rel=1e-9)


def test_the_mean_and_the_spread_of_iterations_grow_with_jitter() -> None:
    problem = uniform(4, 12, p2p=0.5)
    orders = random_orders(problem, Random(1))
    times = [
        iteration_times(problem, orders, Jitter.of(size, size), scenarios=64, seed=0).span
        for size in (0.0, 0.1, 0.3)
    ]
    assert times[0].mean() < times[1].mean() < times[2].mean()
    assert times[0].std() < times[1].std() < times[2].std()


@pytest.mark.parametrize("scenarios", [0, -1, 100_001])
def test_the_number_of_scenarios_is_limited(scenarios: int) -> None:
    problem = uniform(2, 2)
    with pytest.raises(InvalidInput, match="/scenarios"):
        iteration_times(problem, random_orders(problem, Random(1)), Jitter(), scenarios=scenarios, seed=0)
