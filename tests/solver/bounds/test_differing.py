"""Lower bounds of problems whose microbatches differ: below every order, in any order of microbatches."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import differing_problems, uniform, with_sizes
from zbv_solver.bounds import lower_bound
from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.bounds.differing_ramps import Ramps
from zbv_solver.construct.dispatch import serial
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.draw import NUMBERS, differing_stages, number_source
from benchmarks.soak.optimum import optimum
from benchmarks.soak.pipeline import read


@given(differing_problems(), st.integers(0, 1000))
@settings(max_examples=60)
def test_no_random_order_is_better(problem: Problem, seed: int) -> None:
    bounds = [lower_bound(problem, effort).value for effort in ("quick", "full", "thorough")]
    assert bounds == sorted(bounds)
    for orders in random_orders(problem, random.Random(seed), 6):
        verify_orders(problem, orders)
        timing = evaluate(problem, orders)
        value = timing.span if problem.objective == "span" else timing.makespan
        assert bounds[-1] <= value * (1 + 1e-9) + 1e-9


def test_the_longest_microbatch_takes_its_whole_path() -> None:
    """40 times 4 F's and 4 I's on two ranks; the small ones run meanwhile."""
    problem = with_sizes(uniform(2, 3), [0.0, 39.0, 0.0])
    assert lower_bound(problem, "quick").value == pytest.approx(40 * 9)


def test_large_microbatches_run_one_after_another_where_memory_holds_only_one() -> None:
    """The independent model proves the optimum over all orders; what others hold meanwhile decides it."""
    document = {
        "pp_degree": 2,
        "microbatches": 3,
        "placement": "single",
        "objective": "makespan",
        "features": {"size": [5.0, 4.0, 1.0]},
        "costs": {
            name: {"fixed": [0.0] * 2, "size": [slope] * 2}
            for name, slope in (("forward", 2.0), ("backward_input", 3.0), ("backward_weight", 1.0))
        }
        | {"p2p": [1.0]},
        "memory": {
            "forward": {"fixed": [0.0] * 2, "size": [2.0] * 2},
            "backward_input": {"fixed": [0.0] * 2, "size": [-1.0] * 2},
            "backward_weight": {"fixed": [0.0] * 2, "size": [-1.0] * 2},
            "static": [0.0] * 2,
            "limit": [10.0] * 2,
        },
    }
    problem = parse_problem(document)
    best = optimum(read(document), effort=2.0)
    assert best.is_exact
    bounds = {effort: lower_bound(problem, effort).value for effort in ("quick", "full")}
    assert bounds["quick"] < 0.7 * float(best.value)
    assert 0.95 * float(best.value) <= bounds["full"] <= float(best.value) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("limit", "above_load"),
    [(5.0, 0.22), (8.0, 0.02)],
)
def test_ramps_cost_most_where_memory_is_tight(limit: float, above_load: float) -> None:
    """Ranks wait idly for the first backwards, unless memory holds enough. 8 is 1F1B's peak."""
    problem = with_sizes(uniform(4, 6, limit=limit), [0.05 * (j % 4) for j in range(6)])
    load = problem.busy_time(0)
    assert lower_bound(problem, "quick").value < 1.02 * load
    bound = lower_bound(problem)
    assert bound.value == pytest.approx((1 + above_load) * load, rel=0.01)
    assert ("ramps" in bound.reason) == (limit == 5.0)


@pytest.mark.parametrize("window", [0, 3, None])
def test_what_fits_before_and_after_a_time(window: int | None) -> None:
    """The innermost of four ranks: F's of two microbatches fit before the first returns."""
    problem = with_sizes(uniform(4, 6, limit=4.0), [0.0] * 5 + [1e-9])
    ramps = Ramps.of(problem, MicrobatchPaths.of(problem), 3, window)
    arrives = 0 if window == 3 else 3
    assert ramps.early(arrives).work == 0
    assert ramps.early(arrives + 1).work == pytest.approx(1)
    assert ramps.early(arrives + 8).work == pytest.approx(4)
    # Either of the two may be back by then. A W holds half of a cell.
    assert ramps.early(arrives + 9).work == pytest.approx(6)
    assert ramps.late(0.0).work == pytest.approx(8 if window == 0 else 0)


def test_a_small_microbatch_counts_in_one_ramp_only() -> None:
    """It returns before the others; whether it does so first or last, the ranks wait for the large ones."""
    problem = with_sizes(uniform(4, 8, limit=10.0), [0.0] + [1.0] * 7)
    ramps = Ramps.of(problem, MicrobatchPaths.of(problem), 3, 0)
    assert ramps.bound() < 1.05 * problem.busy_time(3) < 1.1 * problem.busy_time(3) < ramps.later(1).bound()
    assert lower_bound(problem).value >= ramps.later(1).bound()


def test_ramps_of_the_large_microbatches_alone() -> None:
    """Memory holds two of the large ones, which are 90 percent of the work."""
    problem = with_sizes(uniform(4, 12, limit=40.0), [0.0, 0.01, 0.02, 0.03, 0.04, 0.05] + [9.0] * 6)
    bound = lower_bound(problem)
    ramps = Ramps.of(problem, MicrobatchPaths.of(problem), 3, 0)
    assert bound.value >= ramps.later(ramps.small()).bound() > 1.1 * problem.busy_time(3)
    assert ramps.small() == 6


@pytest.mark.parametrize("number", range(12))
def test_never_above_the_exact_optimum(number: int) -> None:
    """Problems of the soak test, in floats and over decades, with memory within rounding of the limit."""
    chance = random.Random(f"differing/{number}")
    document = differing_stages(chance, number_source(chance, NUMBERS[number % len(NUMBERS)]))
    pipeline = read(document)
    if not pipeline.is_feasible():
        with pytest.raises(InfeasibleMemory):
            parse_problem(document).require_feasible()
        return
    best = optimum(pipeline, effort=0.05)
    for effort in ("quick", "full", "thorough"):
        assert lower_bound(parse_problem(document), effort).value <= float(best.value) * (1 + 1e-9)


def random_orders(problem: Problem, chance: random.Random, count: int) -> Iterator[Orders]:
    """Orders that run anything of any microbatch that can run, now and then with a bias; stuck ones drop."""
    for _ in range(count):
        weights = [chance.choice([0.1, 1.0, 1.0, 10.0]) for _ in range(4)]
        orders = _random_order(problem, chance, weights)
        if orders is not None:
            yield orders
    yield serial(problem).orders


def _random_order(problem: Problem, chance: random.Random, weights: list[float]) -> Orders | None:
    arrays, n, rank_of = problem.arrays, problem.n_stages, problem.placement.rank_of
    held = arrays.static.copy()
    progress = dict.fromkeys(range(problem.microbatches), 0)  # of 2 n visits
    waiting: list[tuple[int, int]] = []
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.pp_degree)]
    while waiting or any(at < 2 * n for at in progress.values()):
        ready = [(stage, W, j) for stage, j in waiting]
        for j, at in progress.items():
            if at < 2 * n:
                ready += [(at, F, j)] if at < n else [(2 * n - 1 - at, letter, j) for letter in (I, B)]
        fitting = [
            (stage, letter, j)
            for stage, letter, j in ready
            if not exceeds(
                held[rank_of[stage]] + max(0.0, arrays.delta[letter, stage, arrays.kind_of[j]]),
                arrays.limit[rank_of[stage]],
            )
        ]
        if not fitting:
            return None
        stage, letter, j = chance.choices(fitting, [weights[action[1]] for action in fitting])[0]
        held[rank_of[stage]] += arrays.delta[letter, stage, arrays.kind_of[j]]
        ranks[rank_of[stage]].append((stage, letter, j))
        if letter == W:
            waiting.remove((stage, j))
        else:
            progress[j] += 1
            waiting += [(stage, j)] if letter == I else []
    return Orders.pack(ranks)
