"""Lower bounds of problems whose microbatches differ: below every order, in any order of microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import fitting_orders
from support.passing_order import Case, PassingOrder
from support.problems import differing_problems, uniform, with_sizes
from zbv_solver.bounds import lower_bound
from zbv_solver.bounds.differing import MicrobatchPaths
from zbv_solver.bounds.differing_ramps import Ramps
from zbv_solver.bounds.overtaking import passing_of_ranks
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import objective_of
from zbv_solver.verify.verifier import verify_orders

from benchmarks.soak.draw import NUMBERS, differing_stages, number_source
from benchmarks.soak.optimum import optimum
from benchmarks.soak.pipeline import read

Document = dict[str, Any]


@given(differing_problems(), st.integers(0, 1000))
@settings(max_examples=60)
def test_no_random_order_is_better(problem: Problem, seed: int) -> None:
    bounds = [lower_bound(problem, effort).value for effort in ("quick", "full", "thorough")]
    assert bounds == sorted(bounds)
    for orders in fitting_orders(problem, Random(seed), 6):
        verify_orders(problem, orders)
        assert bounds[-1] <= objective_of(problem, orders) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("number", range(12))
def test_never_above_the_exact_optimum(number: int) -> None:
    """Problems of the soak test, in floats and over decades, with memory within rounding of the limit."""
    chance = Random(f"differing/{number}")
    document = differing_stages(chance, number_source(chance, NUMBERS[number % len(NUMBERS)]))
    pipeline = read(document)
    if not pipeline.is_feasible():
        with pytest.raises(InfeasibleMemory):
            parse_problem(document).require_feasible()
        return
    best = optimum(pipeline, effort=0.05)
    for effort in ("quick", "full", "thorough"):
        assert lower_bound(parse_problem(document), effort).value <= float(best.value) * (1 + 1e-9)


def test_the_longest_microbatch_takes_its_whole_path() -> None:
    """40 times 4 F's and 4 I's on two ranks; the small ones run meanwhile."""
    problem = with_sizes(uniform(2, 3), [0.0, 39.0, 0.0])
    assert lower_bound(problem, "quick").value == pytest.approx(40 * 9)


def test_large_microbatches_run_one_after_another_where_memory_holds_only_one() -> None:
    """The independent model proves the optimum over all orders; what others hold meanwhile decides it."""

    def row(slope: float) -> Document:
        return {"fixed": [0.0] * 2, "size": [slope] * 2}

    document = {
        "pp_degree": 2,
        "microbatches": 3,
        "placement": "single",
        "objective": "makespan",
        "features": {"size": [5.0, 4.0, 1.0]},
        "costs": {"forward": row(2), "backward_input": row(3), "backward_weight": row(1), "p2p": [1.0]},
        "memory": {"forward": row(2), "backward_input": row(-1), "backward_weight": row(-1)}
        | {"static": [0.0] * 2, "limit": [10.0] * 2},
    }
    problem = parse_problem(document)
    best = optimum(read(document), effort=2.0)
    assert best.is_exact
    bounds = {effort: lower_bound(problem, effort).value for effort in ("quick", "full")}
    assert bounds["quick"] < 0.7 * float(best.value)
    assert 0.95 * float(best.value) <= bounds["full"] <= float(best.value) * (1 + 1e-9)


@pytest.mark.parametrize(("limit", "above_load"), [(5.0, 0.22), (8.0, 0.02)])
def test_ramps_cost_most_where_memory_is_tight(limit: float, above_load: float) -> None:
    """Ranks wait idly for the first backwards, unless memory holds enough. 8 is 1F1B's peak."""
    problem = with_sizes(uniform(4, 6, limit=limit), [0.05 * (j % 4) for j in range(6)])
    load = problem.busy_time(0)
    assert lower_bound(problem, "quick").value < 1.02 * load
    bound = lower_bound(problem)
    assert bound.value == pytest.approx((1 + above_load) * load, rel=0.01)
    assert ("ramps" in bound.reason) == (limit == 5.0)


def ramps_of(problem: Problem, rank: int, window: int | None) -> Ramps:
    return Ramps.of(problem, MicrobatchPaths.of(problem), rank, window)


@pytest.mark.parametrize("window", [0, 3, None])
def test_what_fits_before_and_after_a_time(window: int | None) -> None:
    """The innermost of four ranks: F's of two microbatches fit before the first returns."""
    ramps = ramps_of(with_sizes(uniform(4, 6, limit=4.0), [0.0] * 5 + [1e-9]), 3, window)
    arrives = 0 if window == 3 else 3
    # Either of the two may be back at 9. A W holds half of a cell.
    early = [ramps.early(arrives + time).work for time in (0, 1, 8, 9)]
    assert early == pytest.approx([0, 1, 4, 6])
    assert ramps.late(0.0).work == pytest.approx(8 if window == 0 else 0)


def test_a_small_microbatch_counts_in_one_ramp_only() -> None:
    """It returns before the others; whether it does so first or last, the ranks wait for the large ones."""
    problem = with_sizes(uniform(4, 8, limit=10.0), [0.0] + [1.0] * 7)
    ramps, load = ramps_of(problem, 3, 0), problem.busy_time(3)
    assert ramps.bound() < 1.05 * load < 1.1 * load < ramps.later(1).bound()
    assert lower_bound(problem).value >= ramps.later(1).bound()


def test_ramps_of_the_large_microbatches_alone() -> None:
    """Memory holds two of the large ones, which are 90 percent of the work."""
    problem = with_sizes(uniform(4, 12, limit=40.0), [0.0, 0.01, 0.02, 0.03, 0.04, 0.05] + [9.0] * 6)
    ramps = ramps_of(problem, 3, 0)
    assert ramps.small() == 6
    assert lower_bound(problem).value >= ramps.later(6).bound() > 1.1 * problem.busy_time(3)


def alone(problem: Problem) -> float:
    return max(passing.alone() for passing in passing_of_ranks(problem))


def of_pairs(problem: Problem) -> float:
    return max(passing.of_pairs() for passing in passing_of_ranks(problem))


def test_two_large_microbatches_take_longer_than_the_path_of_one() -> None:
    """The second one follows by I on both stages of a rank, and its own W. A plan attains this."""
    problem = with_sizes(uniform(3, 2), [9.0, 9.0])
    path, length = 12 * 10.0, 10.0
    assert alone(problem) == pytest.approx(path + 2 * length)
    assert of_pairs(problem) == pytest.approx(path + 3 * length)
    assert search(problem, SearchOptions(effort="quick")).objective == pytest.approx(path + 3 * length)


@pytest.mark.parametrize(
    ("sizes", "bound"),
    [([9.0, 9.0 + 1e-9], 150), ([9.0], 0), ([0.0, 9.0, 1.0, 9.0, 0.0], 150 + 1 + 2 + 1)],
    ids=["two kinds", "one microbatch", "small ones add"],
)
def test_bounds_of_pairs(sizes: list[float], bound: float) -> None:
    assert of_pairs(with_sizes(uniform(3, 1), sizes)) == pytest.approx(bound)


@pytest.mark.parametrize("number", range(20))
def test_no_case_proves_more_than_the_best_order_of_its_kind(number: int) -> None:
    """Two microbatches pass each other in three ways, and have a bound for each: Lemma 58."""
    chance = Random(f"cases/{number}")
    problem = parse_problem(any_sizes(chance))
    rank = chance.randrange(problem.pp_degree)
    one, two = chance.sample(range(problem.microbatches), 2)
    passing = passing_of_ranks(problem)[rank]
    b, c = (problem.arrays.kind_of[[each]] for each in (one, two))
    others = float((passing.cost @ passing.count - passing.cost[b] - passing.cost[c])[0])
    bounds: dict[tuple[Case, tuple[int, ...]], FloatArray] = {
        ("leaves last", ()): passing.leaves_last(b, c),
        ("overtakes", ()): passing.overtakes(b, c),
        **{("leads", within): passing.leads_within(b, c, within) for within in subsets(passing.turns)},
    }
    for (case, within), bound in bounds.items():
        shortest = PassingOrder(problem, rank, one, two).shortest(case, passing.turns, within)
        assert shortest is None or bound[0] + others <= shortest * (1 + 1e-9), (case, within)


def subsets(turns: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(turns, count) for count in range(len(turns) + 1))


def any_sizes(chance: Random) -> Document:
    """Two or three microbatches without anything in common, and ample memory; transfers may be long."""
    shapes = [(1, "v", 2), (1, "loop", 3), (2, "v", 2), (2, "loop", 2), (3, "single", 1), (3, "v", 2)]
    p, placement, chunks = chance.choice(shapes)
    stages, m = p * chunks, chance.choice([2, 3, 3])
    features = {f"is_{j}": [float(j == k) for k in range(m)] for j in range(m)}
    values = chance.choice([(0, 1, 4), (1, 2, 3), (1, 1, 10), (2, 3, 9)])
    transfers = chance.choice([(0,), (0, 5), (0, 3, 20)])

    def amounts(count: int, of: Sequence[int]) -> dict[str, list[float]]:
        return {name: [float(chance.choice(of)) for _ in range(count)] for name in features}

    document = {
        "pp_degree": p,
        "microbatches": m,
        "placement": placement,
        "objective": "span",
        "features": features,
        "costs": {
            **{name: amounts(stages, values) for name in ("forward", "backward_input")},
            "backward_weight": amounts(stages, chance.choice([(0,), values])),
            "p2p": amounts(stages - 1, transfers),
        },
    }
    return {**document, "chunks": chunks} if placement == "loop" else document
