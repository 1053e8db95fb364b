"""Baselines of microbatches that differ: the order used in practice, and DynaPipe's schedule."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import uniform
from zbv_solver.construct.baselines import (
    BASELINES,
    baseline,
    baseline_names,
    clustered,
    cyclic,
    dynapipe,
    merge_stages,
    without_limit,
)
from zbv_solver.construct.rules import practice_order
from zbv_solver.construct.tables import sizes
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan, compare
from zbv_solver.timing.start_times import evaluate, objective_of
from zbv_solver.verify.verifier import verify_orders

Row = tuple[str, int]


def differing(p: int, tokens: list[int], limit: float | None = None) -> Problem:
    """A forward takes and holds a microbatch's tokens; a backward takes twice as long."""
    each: dict[str, Any] = {"tokens": 1}
    return parse_problem(
        {
            "pp_degree": p,
            "microbatches": len(tokens),
            "features": {"tokens": tokens},
            "costs": {"forward": each, "backward_input": each, "backward_weight": each, "p2p": 1},
            "memory": {
                "forward": each,
                "backward_input": {"tokens": -0.5},
                "backward_weight": {"tokens": -0.5},
                "limit": limit,
            },
        }
    )


@st.composite
def differing_problems(draw: st.DrawFn, max_p: int = 5, max_m: int = 9) -> Problem:
    """A limit, if any, is at least what the largest microbatch holds."""
    tokens = draw(
        st.lists(st.integers(1, 9), min_size=2, max_size=max_m).filter(lambda all: len(set(all)) > 1)
    )
    headroom = draw(st.none() | st.integers(0, 30))
    limit = None if headroom is None else 2 * max(tokens) + headroom
    return differing(draw(st.integers(1, max_p)), tokens, limit)


@given(differing_problems())
def test_every_baseline_is_a_valid_order(problem: Problem) -> None:
    names = baseline_names(problem)
    assert set(BASELINES) - set(names) <= {"dualpipe-v"}
    for name in names:
        own, orders = baseline(name, problem)
        verify_orders(without_limit(own), orders)


@given(differing_problems())
def test_practice_has_the_small_ones_at_both_ends(problem: Problem) -> None:
    order, size = practice_order(problem), sizes(problem)
    assert sorted(order.tolist()) == list(range(problem.microbatches))
    largest = int(np.argmax(size[order]))
    assert all(a <= b for a, b in pairwise(size[order][: largest + 1]))
    assert all(a >= b for a, b in pairwise(size[order][largest:]))
    for name in set(BASELINES) & set(baseline_names(problem)):
        given_order, practice = baseline(name, problem)[1], baseline(f"{name}-practice", problem)[1]
        assert practice == given_order.renamed(order)


@given(differing_problems())
def test_dynapipe_keeps_the_memory_limit(problem: Problem) -> None:
    own, orders = baseline("dynapipe", problem)
    verify_orders(own, orders)
    given_order = cyclic(own, np.arange(problem.microbatches))
    assert objective_of(own, orders) <= objective_of(own, given_order)


@given(differing_problems(), st.randoms(use_true_random=False))
def test_the_cyclic_schedule_is_that_of_the_plain_description(problem: Problem, random: Any) -> None:
    merged = merge_stages(problem)
    entry = list(range(problem.microbatches))
    random.shuffle(entry)
    found = cyclic(merged, np.array(entry))
    expected = plain_cyclic(merged, entry)
    for rank in range(merged.pp_degree):
        assert [(each.letter, each.microbatch) for each in found.actions(rank)] == expected[rank]


def plain_cyclic(problem: Problem, entry: list[int]) -> list[list[Row]]:
    """Cycle by cycle: what waits before every rank, and what its neighbours hand over after the cycle."""
    p = problem.pp_degree
    limit = problem.memory.limit or (math.inf,) * p
    tokens = [round(value) for value in problem.features[0].value]
    forwards, backwards = [deque[int]() for _ in range(p)], [deque[int]() for _ in range(p)]
    forwards[0].extend(entry)
    held, rows = [0] * p, [list[Row]() for _ in range(p)]
    while any(forwards) or any(backwards):
        handed: list[tuple[deque[int], int]] = []
        before = sum(map(len, rows))
        for rank in range(p):
            if backwards[rank]:
                j = backwards[rank].popleft()
                held[rank] -= 2 * tokens[j]
                rows[rank].append(("B", j))
                if rank > 0:
                    handed.append((backwards[rank - 1], j))
            if forwards[rank] and held[rank] + 2 * tokens[forwards[rank][0]] <= limit[rank]:
                j = forwards[rank].popleft()
                held[rank] += 2 * tokens[j]
                rows[rank].append(("F", j))
                handed.append((forwards[rank + 1] if rank + 1 < p else backwards[rank], j))
        assert sum(map(len, rows)) > before, "deadlock"
        for queue, j in handed:
            queue.append(j)
    return rows


def test_dynapipe_is_a_schedule_even_if_a_microbatch_exceeds_the_limit() -> None:
    """Its limit may be feasible on the problem's placement and not with one stage per rank."""
    merged = merge_stages(differing(3, [5, 1, 4, 2], limit=10))
    tight = parse_problem(
        {
            "pp_degree": 2,
            "microbatches": 3,
            "features": {"tokens": [1, 2, 3]},
            "costs": {"forward": {"tokens": 1}, "backward_input": 1, "backward_weight": 1, "p2p": 0},
            "memory": {
                "forward": {"tokens": [8, 8, 1, 1]},
                "backward_input": {"tokens": [-8, -8, -1, -1]},
                "backward_weight": 0,
                "limit": 27,
            },
        }
    )
    verify_orders(merged, dynapipe(merged))
    rows = {row.name: row for row in compare(tight)}
    assert not rows["dynapipe"].fits
    assert baseline_plan("dynapipe", tight).problem.memory.limit is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 4))
def test_clusters_have_similar_sizes(size: list[int], count: int) -> None:
    clusters = clustered(np.array(size, np.float64), count)
    assert sorted(np.concatenate(clusters).tolist()) == list(range(len(size)))
    assert len(clusters) <= count
    for smaller, larger in pairwise(clusters):
        assert max(size[j] for j in smaller) < min(size[j] for j in larger)


def test_equal_microbatches_have_no_other_baselines() -> None:
    problem = uniform(3, 6)
    assert [row.name for row in compare(problem)] == list(BASELINES)
    with pytest.raises(InvalidInput, match="must be one of gpipe, 1f1b, eager-1f1b, interleaved-1f1b, zb-h1"):
        baseline("1f1b-practice", problem)


def test_practice_shortens_1f1b_of_one_large_microbatch_at_the_front() -> None:
    """Given first, the large one delays all others on every rank."""
    rows = {row.name: row for row in compare(differing(4, [9, 1, 1, 1, 1, 1, 1, 1], limit=200))}
    assert rows["1f1b-practice"].span < rows["1f1b"].span
    own, orders = baseline("1f1b-practice", differing(4, [9, 1, 1, 1, 1, 1, 1, 1]))
    assert evaluate(own, orders).span == rows["1f1b-practice"].span
