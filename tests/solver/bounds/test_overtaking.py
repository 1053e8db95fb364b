"""Bounds by the paths of large microbatches: below exact optima, and equal to some of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.problems import uniform, with_sizes
from zbv_solver.bounds.overtaking import overtaking_bounds, pair_bounds
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.search import SearchOptions, search

from benchmarks.soak.optimum import optimum
from benchmarks.soak.pipeline import read


def test_two_large_microbatches_take_longer_than_the_path_of_one() -> None:
    """The second one follows by I on both stages of a rank, and its own W. A plan attains this."""
    problem = with_sizes(uniform(3, 2), [9.0, 9.0])
    path, length = 12 * 10.0, 10.0
    assert max(overtaking_bounds(problem)) == pytest.approx(path + 2 * length)
    assert max(pair_bounds(problem)) == pytest.approx(path + 3 * length)
    assert search(problem, SearchOptions(effort="quick")).objective == pytest.approx(path + 3 * length)


def test_every_small_microbatch_adds_to_the_paths_of_two() -> None:
    alone = max(pair_bounds(with_sizes(uniform(3, 2), [9.0, 9.0])))
    with_three = with_sizes(uniform(3, 5), [0.0, 9.0, 1.0, 9.0, 0.0])
    assert max(pair_bounds(with_three)) == pytest.approx(alone + 1 + 2 + 1)


def test_two_different_kinds_or_two_of_one_make_a_pair() -> None:
    assert max(pair_bounds(with_sizes(uniform(3, 2), [9.0, 9.0 + 1e-9]))) == pytest.approx(150)
    assert pair_bounds(with_sizes(uniform(3, 1), [9.0])) == [0.0] * 3


@pytest.mark.parametrize("number", range(24))
def test_no_pair_proves_more_than_the_exact_optimum(number: int) -> None:
    document = two_large(random.Random(f"pairs/{number}"))
    best = optimum(read(document), effort=0.1)
    assert max(pair_bounds(parse_problem(document))) <= float(best.value) * (1 + 1e-9)


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
