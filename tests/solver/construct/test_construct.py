"""Classical schedules equal plain descriptions; constructors find an order wherever one exists."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import (
    differing_problems,
    limited,
    limited_problems,
    problems,
    uniform,
    with_copies,
    with_sizes,
)
from zbv_solver.construct import baselines
from zbv_solver.construct.baselines import BASELINES, baseline, baseline_names, cyclic
from zbv_solver.construct.board import Board, place, stays_safe
from zbv_solver.construct.classical import grouped_interleaved, interleaved_1f1b
from zbv_solver.construct.dispatch import ListScheduler, priority_schedules, serial
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.overtaking import Large, OvertakingRule, OvertakingScheduler
from zbv_solver.construct.rules import EntryRule, changed, entry_rule, mountain, practice_order
from zbv_solver.construct.tables import make_tables, sizes
from zbv_solver.errors import InvalidInput
from zbv_solver.improve.overtaking_search import only
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import F, I, Problem, W
from zbv_solver.search.assemble import baseline_plan, compare
from zbv_solver.timing.start_times import earliest_start_values, evaluate, objective_of
from zbv_solver.verify.verifier import verify_orders


@st.composite
def token_problems(draw: st.DrawFn) -> Problem:
    """A forward takes and holds a microbatch's tokens, a backward takes twice as long.

    A limit, if any, is at least what the largest microbatch holds.
    """
    sizes = st.lists(st.integers(1, 9), min_size=2, max_size=9)
    tokens = draw(sizes.filter(lambda all: len(set(all)) > 1))
    limit = draw(st.none() | st.integers(0, 30).map(lambda headroom: 2 * max(tokens) + headroom))
    problem = uniform(draw(st.integers(1, 5)), len(tokens), p2p=1, limit=limit)
    return with_sizes(problem, [count - 1.0 for count in tokens])


@given(token_problems())
def test_practice_has_the_small_ones_at_both_ends(problem: Problem) -> None:
    order = practice_order(problem)
    assert sorted(order.tolist()) == list(range(problem.microbatches))
    size = sizes(problem)[order]
    largest, steps = int(np.argmax(size)), np.diff(size)
    assert min(steps[:largest], default=0) >= 0 >= max(steps[largest:], default=0)
    for name in set(BASELINES) & set(baseline_names(problem)):
        given_order, practice = baseline(name, problem)[1], baseline(f"{name}-practice", problem)[1]
        assert practice == given_order.renamed(order)


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=12), st.floats(0, 1), st.integers(0, 99))
def test_a_mountain_is_a_permutation_that_rises_and_falls(size: list[float], peak: float, seed: int) -> None:
    order, begin = mountain(np.array(size), peak), seed % len(size)
    other = changed(order, np.random.default_rng(seed), begin)
    assert sorted(order) == sorted(other) == list(range(len(size)))
    assert (order[:begin] == other[:begin]).all()
    steps, top = np.diff(np.array(size)[order]), round(peak * (len(size) - 1))
    if len(set(size)) == len(size):
        assert (np.sign(steps) == [1] * top + [-1] * (len(steps) - top)).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 4))
def test_clusters_have_similar_sizes(size: list[int], count: int) -> None:
    clusters = baselines.clustered(np.array(size, np.float64), count)
    assert sorted(np.concatenate(clusters).tolist()) == list(range(len(size)))
    assert len(clusters) <= count
    for smaller, larger in pairwise(clusters):
        assert max(size[j] for j in smaller) < min(size[j] for j in larger)


@given(problems(max_p=8, max_m=20) | token_problems())
def test_every_baseline_is_a_valid_order_of_the_same_model(problem: Problem) -> None:
    names = baseline_names(problem)
    assert set(BASELINES) - set(names) <= {"dualpipe-v"}
    for name in names:
        of, orders = baseline(name, problem)
        verify_orders(baselines.without_limit(of), orders)
        assert sum(of.costs.forward) == pytest.approx(sum(problem.costs.forward))
        assert sum(of.memory.forward) == pytest.approx(sum(problem.memory.forward))


@given(with_copies())
def test_baselines_with_copies_are_valid_and_need_a_host_without_a_limit(problem: Problem) -> None:
    assert problem.copies is not None
    names = {row.name for row in compare(problem)}
    assert names == set(baseline_names(problem))
    assert ("pipeoffload-full" in names) == (problem.copies.host_limit is None)


# The ranks and microbatches, and the list of one rank. 5 microbatches make rounds of two and of three.
LISTS = """\
1f1b 3 4 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
eager-1f1b 3 6 0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
zb-h1 3 5 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4
interleaved-1f1b 2 5 0F0 0F1 2F0 2F1 0F2 0F3 2B0 0F4 2B1 2F2 0B0 2F3 0B1 2F4 2B2 2B3 2B4 0B2 0B3 0B4
interleaved-1f1b 2 5 1F0 1F1 3F0 3F1 3B0 1F2 3B1 1F3 1B0 1F4 1B1 3F2 3B2 3F3 3B3 3F4 3B4 1B2 1B3 1B4
"""


@pytest.mark.parametrize("row", LISTS.splitlines())
def test_lists_of_classical_schedules(row: str) -> None:
    name, p, m, *texts = row.split()
    assert texts in baseline(name, uniform(int(p), int(m)))[1].all_text()


def test_forwards_of_the_cyclic_schedule_wait_for_memory() -> None:
    """The microbatches have 4, 2, 1, 5, 3 and 1 tokens; a rank holds two for each of them, at most 11."""
    problem = with_sizes(uniform(3, 6, p2p=1, limit=11), [3.0, 1.0, 0.0, 4.0, 2.0, 0.0])
    orders = cyclic(baselines.merge_stages(problem), np.array([2, 3, 0, 4, 1, 5]))
    assert [" ".join(orders.text(rank)) for rank in range(3)] == [
        "0F2 0B2 0F3 0B3 0F0 0B0 0F4 0F1 0B4 0F5 0B1 0B5",
        "1F2 1B2 1F3 1B3 1F0 1B0 1F4 1F1 1B4 1B1 1F5 1B5",
        "2F2 2B2 2F3 2B3 2F0 2B0 2F4 2B4 2F1 2B1 2F5 2B5",
    ]
    of, best = baseline("dynapipe", problem)
    assert objective_of(of, best) < objective_of(of, cyclic(of, np.arange(6)))


def test_a_baseline_that_exceeds_the_limit_is_still_a_plan() -> None:
    """DynaPipe's limit may be feasible on the problem's placement and not with one stage per rank."""
    assert baseline_plan("zb-v", uniform(2, 8, limit=9)).problem.memory.limit == (9, 9)
    uneven = {"forward": [8, 8, 1, 1], "backward_input": [-8, -8, -1, -1], "backward_weight": 0, "limit": 27}
    unequal = with_sizes(uniform(2, 1, memory=uneven), [0.0, 1.0, 2.0])
    for name, problem in (("gpipe", limited(uniform(2, 8), 0.0)), ("dynapipe", unequal)):
        assert not next(row.fits for row in compare(problem) if row.name == name)
        plan = baseline_plan(name, problem)
        assert plan.problem.memory.limit is None
        assert evaluate(plan.problem, plan.orders).makespan == plan.metrics.makespan


COSTS = {
    "forward": [966, 1108, 1140, 1117, 1002, 1183, 996, 1040],
    "backward_input": [940, 1187, 1087, 1310, 1058, 930, 915, 1300],
    "backward_weight": [614, 768, 744, 775, 662, 594, 740, 812],
}
UNEVEN = uniform(4, 16, costs=COSTS | {"p2p": 50})
# A merged stage of the uniform problem has F = 2 and B = 4. The uneven stages have the spans of others' 1F1B,
# PyTorch's interleaved 1F1B and ZB-1p; V-half and V-min those of zbv_greedy.py in sail-sg/zero-bubble.
# DualPipeV has that of PyTorch's list if F and B do not overlap.
PUBLISHED = [
    *((name, uniform(4, m), (m + 3) * 6) for m in (1, 5, 16) for name in ("gpipe", "1f1b", "eager-1f1b")),
    *(("interleaved-1f1b", uniform(4, m), m * 6 + 9) for m in (4, 16)),
    ("zb-v", uniform(4, 16), 16 * 6),
    ("dualpipe-v", uniform(4, 16), 99),
    *(("1f1b", UNEVEN, 114969), ("interleaved-1f1b", UNEVEN, 110587), ("zb-h1", UNEVEN, 106315)),
    *(("v-half", uniform(p, 4 * p), span) for p, span in ((4, 101), (5, 131), (16, 425))),
    *(("v-min", uniform(p, 4 * p), span) for p, span in ((3, 77), (6, 161), (12, 329))),
]


@pytest.mark.parametrize(("name", "problem", "span"), PUBLISHED)
def test_a_baseline_takes_the_time_that_others_publish(name: str, problem: Problem, span: float) -> None:
    (row,) = [row for row in compare(problem) if row.name == name]
    assert row.span == span
    if name.endswith(("1f1b", "zb-h1", "gpipe")):
        assert row.makespan == span


@pytest.mark.parametrize("p", range(1, 26))
def test_what_baselines_hold(p: int) -> None:
    """In forwards of a chunk, of which 1F1B holds 2p. Qi et al. 2024 state those of V-half and V-min."""
    peaks = {row.name: list(row.peak_memory) for row in compare(uniform(p, 2 * p + 2))}
    assert peaks["gpipe"] == [4 * p + 4] * p
    assert peaks["1f1b"] == [2 * (p - rank) for rank in range(p)]
    assert peaks["eager-1f1b"] == [2 * (2 * (p - rank) - 1) for rank in range(p)]
    assert max(peaks["zb-h1"]) == max(peaks["zb-v"]) == 2 * p
    assert max(peaks["v-half"]) == 2 * (p // 2) + 2
    assert max(peaks["v-min"]) == 2 * math.ceil((p - 1) / 3) + 2


def test_a_baseline_states_whether_it_fits_and_is_absent_with_a_reason() -> None:
    fits = {row.name for row in compare(uniform(4, 16, limit=8)) if row.fits}
    assert fits == {"1f1b", "zb-h1", "zb-v", "v-half", "v-min"}
    few, loop = uniform(4, 7), uniform(2, 4, placement="loop", chunks=3)
    assert "needs two stages per rank; the problem has 3" in baselines.missing("v-half", loop)
    assert not {"zb-v", "v-half", "v-min", "dualpipe-v"} & set(baseline_names(loop))
    assert baseline_names(uniform(3, 6)) == BASELINES
    for name, problem, says in (
        ("dualpipe-v", few, "'dualpipe-v'; needs a microbatch per stage, 8; the problem has 7"),
        ("2f2b", few, "must be one of gpipe, 1f1b"),
        ("1f1b-practice", few, "must be one of gpipe, 1f1b"),
    ):
        with pytest.raises(InvalidInput, match=says):
            baseline(name, problem)


def test_with_copies_pipeoffload_needs_less_memory_and_hardly_more_time() -> None:
    """Its copies hide behind 1F1B's work; without stages to choose from, there is no half of them."""
    costs = {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1, "offload": 12}
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1}
    problem = uniform(4, 16, costs=costs, memory=memory)
    rows = {row.name: row for row in compare(problem)}
    plain, half, full, selective = (rows[name] for name in ("interleaved-1f1b", *baselines.OFFLOADED))
    assert max(full.peak_memory) < max(half.peak_memory) < 0.7 * max(plain.peak_memory)
    assert max(selective.peak_memory) <= 0.5 * max(half.peak_memory)
    assert plain.span <= half.span <= full.span <= selective.span <= 1.05 * plain.span
    assert "pipeoffload-half" not in baseline_names(uniform(4, 16, costs=costs, placement="single"))
    assert set(rows) - set(baseline_names(problem.without_copies())) == set(baselines.OFFLOADED)


@pytest.mark.parametrize(("p", "chunks"), [(2, 2), (4, 2), (4, 3), (5, 2), (8, 4), (16, 2)])
def test_interleaved_1f1b_in_smaller_groups_holds_about_half(p: int, chunks: int) -> None:
    """Equal durations and no transfers, for which its slots are made."""
    m = 4 * p
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, "p2p": 0}
    memory = {"forward": 1, "backward_input": 0, "backward_weight": -1}
    problem = uniform(p, m, costs=costs, memory=memory, placement="loop", chunks=chunks)
    usual, grouped = (
        evaluate(problem, Orders.of_rows([order(rank, p, m, chunks) for rank in range(p)]))
        for order in (interleaved_1f1b, grouped_interleaved)
    )
    assert max(grouped.peak_memory) <= 0.5 * max(usual.peak_memory) + chunks + 1
    assert grouped.makespan <= 1.05 * usual.makespan


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 4), (4, 8), (4, 32), (8, 16), (16, 64), (32, 64)])
def test_greedy_v_has_no_bubble_at_the_memory_of_1f1b(p: int, m: int) -> None:
    """Uniform costs, no transfers, m >= 2p: the span is the work of one rank (Qi et al. 2024)."""
    problem = uniform(p, m, limit=2 * p)
    assert min(attempt.span for attempt in get_v_schedule(problem)) == 6 * m
    cheap = replace(problem, costs=replace(problem.costs, backward=(1.0,) * 2 * p))
    assert min(attempt.span for attempt in get_v_schedule(cheap)) < 6 * m, "cheap fused backwards are used"


@given(limited_problems(max_p=5, max_m=8, kinds=("v", "loop", "single")))
def test_every_attempt_is_valid_and_states_its_value(problem: Problem) -> None:
    """Lists never get stuck: the admission of forwards keeps a way out at every feasible limit."""
    lists, greedy = list(priority_schedules(problem, (1.0, 0.5))), get_v_schedule(problem)
    assert len(lists) in (12, 36)
    for attempt in [serial(problem), *lists, *(greedy if problem.placement.kind == "v" else ())]:
        verify_orders(problem, attempt.orders)
        timing = evaluate(problem, attempt.orders)
        assert attempt.makespan == pytest.approx(timing.makespan)
        assert attempt.span >= timing.span * (1 - 1e-12)


def test_small_microbatches_do_not_delay_a_large_one_that_they_defer_to() -> None:
    problem = with_sizes(uniform(8, 1), [0.0] * 12 + [19.0] + [0.0] * 11)
    path = 20.0 * 2 * problem.n_stages
    for defer, waits in ((math.inf, True), (2.0, False)):
        rule = entry_rule(problem, EntryRule("forward-deep", 0.5, 2.0, 1.0, 1.0, defer))
        attempt: Any = ListScheduler(problem).attempt(rule, "list")
        orders, timing = attempt.orders, evaluate(problem, attempt.orders)
        large = (orders.microbatch == 12) & (orders.letter != W)
        took = timing.end[large].max() - timing.start[large].min()
        assert (took > path) == waits


def around(problem: Problem, chosen: list[int]) -> OvertakingScheduler:
    """A scheduler around the chosen microbatches, which run one after another."""
    large = np.array(chosen)
    alone = only(problem, large)
    return OvertakingScheduler(problem, Large.of(problem, large, alone, serial(alone).orders))


def rule(problem: Problem, **changes: Any) -> OvertakingRule:
    m, chunks = problem.microbatches, problem.placement.chunks
    usual = OvertakingRule(1000.0, 0.2, np.arange(m, dtype=np.float64), np.zeros(4 * chunks), m, 0.5, True)
    return usual._replace(**changes)


RULES = st.fixed_dictionaries(
    {
        "deadline": st.sampled_from([0.0, 1.0, 50.0, 1e9]),
        "slack": st.sampled_from([0.0, 0.3, 1.0]),
        "patience": st.sampled_from([0.0, 0.3, 1.0]),
        "cap": st.sampled_from([1, 2, 100]),
        "by_arrival": st.booleans(),
    }
)


@given(differing_problems(), st.integers(0, 4), RULES)
@settings(max_examples=80)
def test_complete_orders_are_valid_and_state_their_value(problem: Problem, which: int, how: Any) -> None:
    scheduler = around(problem, [which % problem.microbatches])
    value = scheduler.value(rule(problem, **how))
    if value == np.inf:  # what a microbatch may need on a rank does not fit
        assert not scheduler.tables.is_ample.all() or (problem.arrays.delta[I] > 0).any()
        return
    orders = scheduler.orders()
    verify_orders(problem, orders)
    makespan, span = earliest_start_values(problem, orders)
    assert value == pytest.approx(span if problem.objective == "span" else makespan)


def test_small_microbatches_overtake_while_the_large_one_is_on_its_way() -> None:
    """Without slack, all enter after it, do not delay it, and return before it."""
    costs: Any = {name: {"size": 1} for name in ("forward", "backward_input", "backward_weight")}
    costs["p2p"] = {"size": 0.5}
    problem = uniform(8, 21, features={"size": [20] + [1] * 20}, costs=costs)
    scheduler, path = around(problem, [0]), 20 * 2 * 16 + 10 * 4 * 7
    assert scheduler.value(rule(problem, slack=0.0, patience=0.0, deadline=float(path))) == path + 20
    board = scheduler.board
    code, microbatch = (row[0, : board.length[0]].copy() for row in (board.code, board.microbatch))
    assert microbatch[code == F][0] == 0
    assert microbatch[code == I][-1] == 0
    assert scheduler.value(rule(problem, slack=1.0)) < np.inf
    assert board.microbatch[0, 0] != 0


def test_a_small_microbatch_must_not_take_what_a_large_one_still_needs() -> None:
    """The older microbatch needs 5 more for its second forward, so the younger one has to wait."""
    memory = {"forward": 1, "backward_input": 0, "backward_weight": -1}
    for limit, is_safe in ((12, False), (13, True)):
        problem = with_sizes(uniform(2, 1, memory=memory | {"limit": limit}), [4.0, 2.0])
        board = Board.of(tables := make_tables(problem))
        board.level[:, 1] = tables.static
        place(tables, board, 0, F, 0.0)
        assert stays_safe(tables, board, 0, 0) == is_safe
