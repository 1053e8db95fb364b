"""Classical schedules: valid at every size, equal to what other implementations reach."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.problems import limited, problems, uniform, uniform_document
from zbv_solver.construct.baselines import baseline, baseline_names, merge_stages, missing, without_limit
from zbv_solver.construct.classical import eager_1f1b, gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan, compare
from zbv_solver.timing.start_times import evaluate
from zbv_solver.verify.verifier import verify_orders

Row = tuple[int, int, int]
UNEVEN = {
    "pp_degree": 4,
    "microbatches": 16,
    "costs": {
        "forward": [966, 1108, 1140, 1117, 1002, 1183, 996, 1040],
        "backward_input": [940, 1187, 1087, 1310, 1058, 930, 915, 1300],
        "backward_weight": [614, 768, 744, 775, 662, 594, 740, 812],
        "p2p": 50,
    },
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16},
}


@given(problems(max_p=8, max_m=20))
def test_every_baseline_is_valid_at_every_size(problem: Problem) -> None:
    for name in baseline_names(problem):
        own, orders = baseline(name, problem)
        verify_orders(without_limit(own), orders)


@given(st.integers(1, 9), st.integers(1, 25), st.integers(1, 4))
def test_lists_are_those_of_the_plain_descriptions(p: int, m: int, chunks: int) -> None:
    for rank in range(p):
        assert rows(gpipe(rank, p, m)) == alternate(forwards(rank, m), backwards(rank, m), m)
        assert rows(one_f_one_b(rank, p, m)) == alternate(forwards(rank, m), backwards(rank, m), p - 1 - rank)
        assert rows(eager_1f1b(rank, p, m)) == alternate(
            forwards(rank, m), backwards(rank, m), 2 * (p - 1 - rank)
        )
        assert rows(zb_h1(rank, p, m)) == plain_zb_h1(rank, p, m)
        assert rows(interleaved_1f1b(rank, p, m, chunks)) == plain_interleaved(rank, p, m, chunks)


def rows(array: NDArray[np.int32]) -> list[Row]:
    return [(stage, letter, j) for stage, letter, j in array.tolist()]


def forwards(stage: int, m: int) -> list[Row]:
    return [(stage, F, j) for j in range(m)]


def backwards(stage: int, m: int) -> list[Row]:
    return [(stage, B, j) for j in range(m)]


def alternate(forward: list[Row], backward: list[Row], warm_up: int) -> list[Row]:
    """``warm_up`` forwards, then a forward, while there are any, and a backward."""
    found, left = forward[:warm_up], forward[warm_up:]
    for row in backward:
        found += [left.pop(0), row] if left else [row]
    return found


def plain_zb_h1(rank: int, p: int, m: int) -> list[Row]:
    found = [(rank, F, j) for j in range(min(m, p - rank))]
    for j in range(m):
        found.append((rank, I, j))
        if j >= rank:
            found.append((rank, W, j - rank))
        if j + p - rank < m:
            found.append((rank, F, j + p - rank))
    return found + [(rank, W, j) for j in range(max(0, m - rank), m)]


def plain_interleaved(rank: int, p: int, m: int, chunks: int) -> list[Row]:
    rounds = max(1, m // p)
    pairs = list(pairwise(m * k // rounds for k in range(rounds + 1)))
    forward = [(c * p + rank, F, j) for lo, hi in pairs for c in range(chunks) for j in range(lo, hi)]
    backward = [
        (c * p + rank, B, j) for lo, hi in pairs for c in reversed(range(chunks)) for j in range(lo, hi)
    ]
    longest = max(hi - lo for lo, hi in pairs)
    return alternate(forward, backward, (chunks - 1) * longest + 2 * (p - 1 - rank))


@pytest.mark.parametrize("m", [1, 3, 4, 5, 7, 8, 11, 16])
def test_baselines_of_uniform_stages_take_their_textbook_time(m: int) -> None:
    """p = 4, a merged stage with F = 2 and B = 4, no transfers."""
    spans = {row.name: row.makespan for row in compare(uniform(4, m))}
    assert spans["gpipe"] == spans["1f1b"] == spans["eager-1f1b"] == (m + 3) * 6
    if m % 4 == 0:
        assert spans["interleaved-1f1b"] == m * 6 + 3 * 3


@pytest.mark.parametrize(
    ("name", "span", "makespan", "peak"),
    [
        ("1f1b", 114969, 114969, 16),
        ("interleaved-1f1b", 110587, 110587, 22),
        ("zb-h1", 106315, 106315, 16),
    ],
)
def test_equal_to_other_implementations(name: str, span: float, makespan: float, peak: float) -> None:
    """Uneven stages, p = 4, m = 16: 1F1B, PyTorch's interleaved 1F1B and ZB-1p as others built them."""
    problem = parse_problem(UNEVEN)
    row = next(row for row in compare(problem) if row.name == name)
    assert (row.span, row.makespan, max(row.peak_memory)) == (span, makespan, peak)


def test_warm_up_depths() -> None:
    """In flight on rank r of p: p - r under 1F1B, 2 (p - r) - 1 under eager 1F1B, everything under GPipe."""
    peaks = {row.name: list(row.peak_memory) for row in compare(uniform(4, 16))}
    assert peaks["1f1b"] == [8, 6, 4, 2]
    assert peaks["eager-1f1b"] == [14, 10, 6, 2]
    assert peaks["gpipe"] == [32, 32, 32, 32]
    assert max(peaks["zb-h1"]) == 8


@given(problems(max_p=5, max_m=4))
def test_merging_keeps_the_model(problem: Problem) -> None:
    merged = merge_stages(problem)
    assert merged.placement.kind == "single"
    assert merged.n_stages == problem.pp_degree
    assert sum(merged.costs.forward) == pytest.approx(sum(problem.costs.forward))
    assert sum(merged.memory.forward) == sum(problem.memory.forward)
    assert merged.costs.p2p == problem.costs.p2p[1::2]


def test_fits_judges_the_limit() -> None:
    fits = {row.name: row.fits for row in compare(uniform(4, 16, limit=8))}
    assert fits == {
        "gpipe": False,
        "1f1b": True,
        "eager-1f1b": False,
        "interleaved-1f1b": False,
        "zb-h1": True,
        "zb-v": True,
        "v-half": True,
        "v-min": True,
        "dualpipe-v": False,
    }


@pytest.mark.parametrize("p", range(1, 26))
def test_memory_of_v_half_and_v_min(p: int) -> None:
    """In forwards of a chunk, of which 1F1B holds 2p: 2 ⌊p/2⌋ + 2, and 2 ⌈(p - 1)/3⌉ + 2 (Qi et al. 2024)."""
    peaks = {row.name: max(row.peak_memory) for row in compare(uniform(p, 2 * p + 2))}
    assert peaks["1f1b"] == 2 * p
    assert peaks["v-half"] == 2 * (p // 2) + 2
    assert peaks["v-min"] == 2 * math.ceil((p - 1) / 3) + 2


@pytest.mark.parametrize(
    ("name", "p", "m", "span"),
    [
        # The spans of zbv_greedy.py in sail-sg/zero-bubble for F = I = W = 1, without transfers.
        ("v-half", 4, 16, 101),
        ("v-half", 5, 20, 131),
        ("v-half", 16, 64, 425),
        ("v-min", 3, 12, 77),
        ("v-min", 6, 24, 161),
        ("v-min", 12, 48, 329),
    ],
)
def test_v_half_and_v_min_are_as_fast_as_the_published_ones(name: str, p: int, m: int, span: int) -> None:
    (found,) = [row.span for row in compare(uniform(p, m)) if row.name == name]
    assert found == span


def test_zero_bubble_of_a_v_has_no_bubble_between_equal_actions() -> None:
    """ScheduleZBVZeroBubble of PyTorch, for F = I = W: the steady state is full."""
    row = next(row for row in compare(uniform(4, 16)) if row.name == "zb-v")
    assert row.span == 16 * 6
    assert max(row.peak_memory) == 8


def test_dualpipe_v_runs_pairs_one_after_the_other() -> None:
    own, orders = baseline("dualpipe-v", uniform(2, 4))
    assert own.placement.kind == "v"
    assert len(orders) < 2 * 3 * 2 * 4  # most backwards are fused


def test_a_baseline_is_absent_with_a_reason() -> None:
    few, loop = uniform(4, 7), parse_problem(uniform_document(2, 4) | {"placement": "loop", "chunks": 3})
    assert "needs a microbatch per stage, 8; the problem has 7" in missing("dualpipe-v", few)
    assert "needs two stages per rank; the problem has 3" in missing("v-half", loop)
    assert not {"zb-v", "v-half", "v-min", "dualpipe-v"} & set(baseline_names(loop))
    with pytest.raises(InvalidInput, match="found baseline 'dualpipe-v'; needs a microbatch per stage"):
        baseline("dualpipe-v", few)


def test_a_baseline_that_does_not_fit_is_still_a_plan() -> None:
    plan = baseline_plan("gpipe", limited(uniform(2, 8), 0.0))
    assert plan.problem.memory.limit is None
    assert evaluate(plan.problem, plan.orders).makespan == plan.metrics.makespan


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one of gpipe, 1f1b"):
        baseline("2f2b", uniform(2, 2))
