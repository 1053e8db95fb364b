"""Bounds by the paths of large microbatches: below exact optima, and equal to some of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import Any

import pytest
from support.passing_order import Case, PassingOrder
from support.problems import uniform, with_sizes
from zbv_solver.bounds.overtaking import passing_of_ranks
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from benchmarks.soak.optimum import optimum
from benchmarks.soak.pipeline import read


def alone(problem: Problem) -> float:
    return max(each.alone() for each in passing_of_ranks(problem))


def of_pairs(problem: Problem) -> float:
    return max(each.of_pairs() for each in passing_of_ranks(problem))


def test_two_large_microbatches_take_longer_than_the_path_of_one() -> None:
    """The second one follows by I on both stages of a rank, and its own W. A plan attains this."""
    problem = with_sizes(uniform(3, 2), [9.0, 9.0])
    path, length = 12 * 10.0, 10.0
    assert alone(problem) == pytest.approx(path + 2 * length)
    assert of_pairs(problem) == pytest.approx(path + 3 * length)
    assert search(problem, SearchOptions(effort="quick")).objective == pytest.approx(path + 3 * length)


def test_every_small_microbatch_adds_to_the_paths_of_two() -> None:
    two = of_pairs(with_sizes(uniform(3, 2), [9.0, 9.0]))
    with_three = with_sizes(uniform(3, 5), [0.0, 9.0, 1.0, 9.0, 0.0])
    assert of_pairs(with_three) == pytest.approx(two + 1 + 2 + 1)


def test_two_different_kinds_or_two_of_one_make_a_pair() -> None:
    assert of_pairs(with_sizes(uniform(3, 2), [9.0, 9.0 + 1e-9])) == pytest.approx(150)
    assert of_pairs(with_sizes(uniform(3, 1), [9.0])) == 0


@pytest.mark.parametrize("number", range(12))
def test_no_pair_proves_more_than_the_exact_optimum(number: int) -> None:
    document = two_large(random.Random(f"pairs/{number}"))
    best = optimum(read(document), effort=0.1)
    assert of_pairs(parse_problem(document)) <= float(best.value) * (1 + 1e-9)


@pytest.mark.parametrize("number", range(20))
def test_no_case_proves_more_than_the_best_order_of_its_kind(number: int) -> None:
    """Two microbatches pass each other in three ways, and have a bound for each: Lemma 58."""
    chance = random.Random(f"cases/{number}")
    problem = any_sizes(chance)
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
        found = PassingOrder(problem, rank, one, two).shortest(case, passing.turns, within)
        assert found is None or bound[0] + others <= found * (1 + 1e-9), (case, within)


def subsets(turns: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(turns, count) for count in range(len(turns) + 1))


def any_sizes(chance: random.Random) -> Problem:
    """Microbatches without anything in common, and ample memory."""
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
        "features": features,
        "costs": {
            **{name: amounts(stages, values) for name in ("forward", "backward_input")},
            "backward_weight": amounts(stages, chance.choice([(0,), values])),
            "p2p": amounts(stages - 1, transfers),
        },
    }
    return parse_problem({**document, "chunks": chunks} if placement == "loop" else document)


def two_large(chance: random.Random) -> dict[str, Any]:
    """Two large microbatches, sometimes a small one; memory is ample, transfers may be long."""
    p, placement = chance.choice([(2, "v"), (2, "v"), (3, "single"), (3, "v"), (4, "v")])
    stages = 2 * p if placement == "v" else p
    size = [float(chance.randint(4, 9)), float(chance.randint(4, 9)), float(chance.randint(0, 3))]
    m = chance.choice([2, 2, 3])
    values = chance.choice([(0, 0, 1, 4), (1, 2, 3), (0, 1, 1, 1, 8)])

    def row() -> dict[str, list[float]]:
        """The same on both stages of a rank."""
        of_rank = [float(chance.choice(values)) for _ in range(p)]
        return {"fixed": [0.0] * stages, "size": (of_rank + of_rank[::-1])[:stages]}

    def amounts(each: float) -> dict[str, list[float]]:
        return {"fixed": [0.0] * stages, "size": [each] * stages}

    has_weights = chance.random() < 0.5
    return {
        "pp_degree": p,
        "microbatches": m,
        "placement": placement,
        "objective": chance.choice(["span", "makespan"]),
        "features": {"size": size[:m]},
        "costs": {
            "forward": row(),
            "backward_input": row(),
            "backward_weight": row() if has_weights else amounts(0.0),
            "p2p": {"fixed": [0.0] * (stages - 1), "size": row()["size"][1:]},
        },
        "memory": {
            "forward": amounts(1.0),
            "backward_input": amounts(0.0),
            "backward_weight": amounts(-1.0),
            "static": [0.0] * p,
            "limit": [1000.0] * p,
        },
    }
