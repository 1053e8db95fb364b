"""All cuts of a few layers, what is proved of each, and the most regular of those that are hardly longer."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import layer, layered
from zbv_models.fixed_orders.executor_cut import cut_for_executor
from zbv_models.fixed_orders.order_search import (
    ACTIONS,
    OrderSearch,
    all_bounds,
    listed_cuts,
    order_search,
    proved_of,
)
from zbv_models.fixed_orders.regular_cut import TOLERANCE, Once, irregularities, regular_cut
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_solver.partition.runs import WHOLE, Choice, First, Recomputed
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.assemble import OwnUnit
from zbv_solver.timing.start_times import evaluate

Bounds = tuple[int, ...]


def searched(
    problem: LayeredProblem, schedule: Schedule, recompute: Recomputed | First | None
) -> OrderSearch:
    unit = OwnUnit.of(problem)
    return order_search(unit, schedule, recompute, allow_empty=True, late=None, effort="quick")


# --- all cuts

SCHEDULES = (megatron_schedule(2, 4, 2), torch_schedule("1F1B", 3, 4), torch_schedule("ZBVZeroBubble", 2, 4))


def recomputable(times: list[int], backward: int | None, ranks: int, **more: Any) -> LayeredProblem:
    memory = {"forward": 1, "backward_input": -1, "backward_weight": 0}
    layers = [
        layer(f"l{at}", time, 2, 1, held=4, backward=backward)
        | {"recompute": {"backward_input": 2 + time, "backward_weight": 1, "memory": memory}}
        for at, time in enumerate(times)
    ]
    return layered(ranks, 4, layers, 1, placement="single", **more)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=5, max_size=7),
    st.sampled_from([None, 1, 6]),
    st.sampled_from(SCHEDULES),
    st.booleans(),
    st.floats(0.5, 2.0),
    st.sampled_from([None, First(), First(1, 2)]),
)
def test_every_cut_is_listed_with_a_bound_unless_a_rank_works_too_long(
    times: list[int], backward: int | None, schedule: Schedule, is_filled: bool, share: float, recompute: Any
) -> None:
    cut = {"cut": {"allow_empty": False}} if is_filled else {}
    search = searched(recomputable(times, backward, schedule.placement.pp_degree, **cut), schedule, recompute)
    search.screen()
    search.estimate()
    runs, n, stages = search.runs, len(times), schedule.placement.n_stages
    inner = combinations_with_replacement(range(n + 1), stages - 1)
    allowed = {bounds for middle in inner if runs.allows(bounds := (0, *middle, n))}
    every, most = all_bounds(runs), share * search.bound / search.problem.microbatches
    kept = all_bounds(runs, most)
    assert every is not None
    assert kept is not None
    assert sorted(map(tuple, every.tolist())) == sorted(allowed)
    assert all_bounds(runs, most=len(allowed) - 1) is None
    loads = {each: search.space.worst_load(search.space.cut(each, (False,) * stages)) for each in allowed}
    # Whole stages may have a cheaper fused backward than their layers one by one.
    assert {*map(tuple, kept.tolist())} >= {bounds for bounds in allowed if loads[bounds] <= most}
    assert all(loads[tuple(bounds)] <= most * (1 + 1e-6) for bounds in kept.tolist()) or backward == 1
    # No cut is shorter than what is proved of it.
    listed = list(listed_cuts(runs, recompute, search.tight_terms(), np.inf) or ())
    assert {bounds for _, (bounds, _) in listed} == allowed
    assert [bound for bound, _ in listed] == sorted(bound for bound, _ in listed)
    if recompute is None:
        assert {again for _, (_, chosen) in listed for again in chosen} == {0, WHOLE}
        assert len({chosen for _, (_, chosen) in listed}) == 2**stages
    values = [runs.value(search.order, choice) for _, choice in listed]
    assert all(bound <= value * (1 + 1e-9) for (bound, _), value in zip(listed, values, strict=True))
    assert search.bound <= min(values) * (1 + 1e-9)
    # The terms are exact for the cut that they were made at.
    assert search.best is not None
    counts = runs.counts(search.best[0])
    exact = next(search.order.critical(*runs.costs(counts, runs.again(counts, search.best[1]))))
    (proved,) = proved_of(runs, [exact], np.array([search.best[0]]), search.best[1]).tolist()
    assert proved == pytest.approx(search.value)


@pytest.mark.parametrize("recompute", [None, (0, 0, 0), First()])
def test_it_is_proved_that_nothing_fits(recompute: Recomputed | First | None) -> None:
    search = searched(recomputable([1, 2, 3, 4, 5], None, 3, memory={"limit": 2.5}), SCHEDULES[1], recompute)
    search.bound_loads()
    assert search.is_infeasible, "by loads and memory, without a list of cuts"
    search.bound = 0.0
    search.finish(np.inf, 1.0)
    assert search.is_infeasible


def test_a_search_that_may_time_no_more_actions_lists_no_cuts_and_claims_no_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ACTIONS, "quick", 0)
    search = searched(recomputable([1, 5, 1, 5, 1, 5], None, 2), SCHEDULES[0], (0,) * 4)
    timed: list[Choice] = []
    search.screen()
    consider = search.local.consider

    def counted(choice: Choice) -> tuple[float, float]:
        timed.append(choice)
        return consider(choice)

    monkeypatch.setattr(search.local, "consider", counted)
    search.finish(math.inf, 1.0)
    assert len(timed) <= 1
    assert search.bound < search.value


# --- the most regular

INTERLEAVED = torch_schedule("Interleaved1F1B", 2, 8, 2)


def irregularity(problem: LayeredProblem, bounds: Bounds) -> list[int]:
    """Of the cut with these boundaries between layers."""
    before = np.array(problem.model.blocks_before)
    return list(
        map(int, irregularities(np.diff(before[list(bounds)])[None], np.diff(np.array(bounds))[None])[0])
    )


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.001, 1.004]), min_size=5, max_size=8),
    st.sampled_from([0.5, 1.5, 3.0]),
    st.sampled_from([None, None, 30]),
    st.sampled_from([0.0, 2.0, 20.0]),
    st.sampled_from([0.0, 40.0]),
)
def test_of_the_cuts_that_fit_and_are_hardly_longer_it_is_the_most_regular(
    times: list[float], head: float, limit: float | None, end: float, fixed: float
) -> None:
    """Ends that need long once per step may forbid the cut that is the most regular without them."""
    named = {"embedding": 0.25, **{f"block{at}": time for at, time in enumerate(times)}, "head": head}
    layers = [layer(name, time, held=time) for name, time in named.items()]
    problem = layered(2, 8, layers, placement="single", memory={"limit": limit})
    search = searched(problem, INTERLEAVED, (0,) * 4)
    search.seek_cut()
    search.finish(math.inf, 1.0)
    assert search.best is not None
    unit, n = OwnUnit.of(problem), len(layers)
    spans: dict[Bounds, float] = {}
    for bounds in ((0, *inner, n) for inner in combinations_with_replacement(range(1, n), 3)):
        cut = unit.problem.cut_into(INTERLEAVED.placement, Cut.at(bounds))
        timing, limits = evaluate(cut, INTERLEAVED.orders()), cut.memory.limit
        if limits is None or all(a <= b for a, b in zip(timing.peak_memory, limits, strict=True)):
            spans[bounds] = timing.span
    least = min(spans.values())
    assert search.value == pytest.approx(least)
    once = np.array([end, *(1.0 for _ in times), end]) * least / 100
    chosen, _ = regular_cut(search, Once(once, fixed * least / 100))

    def step(bounds: Bounds) -> float:
        loads = np.add.reduceat(np.append(once, 0.0), bounds[:-1]) * (np.diff(bounds) > 0)
        return float(spans[bounds] + max(loads[[0, 2]].sum(), loads[[1, 3]].sum()) + fixed * least / 100)

    shortest = step(search.best[0])
    good = {
        bounds: irregularity(problem, bounds)
        for bounds, span in spans.items()
        if span <= least * (1 + TOLERANCE) and step(bounds) <= shortest * (1 + TOLERANCE)
    }
    assert good[chosen] == min(good.values())


def test_regular_means_few_empty_stages_then_few_lengths_then_few_changes_then_a_small_range() -> None:
    blocks = np.array([[7, 9, 8, 3], [0, 10, 15, 2], [8, 8, 8, 3], [8, 3, 8, 8], [8, 8, 8, 4], [9, 9, 9, 0]])
    order = irregularities(blocks, blocks).tolist()
    by_rank = sorted(range(len(order)), key=lambda at: order[at])
    assert by_rank == [4, 2, 3, 0, 5, 1]


Times = dict[str, tuple[int, float, float, float]]
"""Copies of every layer, and the times of F, I and W."""
MOONLIGHT: Times = {
    "embedding": (1, 50, 0, 3053),
    "dense": (1, 1596, 2023, 1043),
    "moe": (26, 6966, 7394, 1091),
    "head": (1, 14013, 7680, 3787),
}
DEEPSEEK: Times = {
    "embedding": (1, 88, 0, 5662),
    "dense": (3, 7236, 10498, 3827),
    "moe": (58, 10858, 14056, 3924),
    "mtp": (1, 12066, 15221, 10251),
    "head": (1, 37066, 27494, 20855),
}
NO_MTP: Times = {"embedding": (1, 88, 0, 8449), "dense": DEEPSEEK["dense"], "moe": (58, 10858, 14056, 3927)}
NO_MTP["head"] = (1, 18533, 13747, 10428)


def published(ranks: int, microbatches: int, times: Times, p2p: float) -> LayeredProblem:
    layers = [layer(name, *each, repeat=copies) for name, (copies, *each) in times.items()]
    return layered(ranks, microbatches, layers, p2p)


@pytest.mark.parametrize(
    ("problem", "most", "is_even_kept"),
    [
        # 7/9/8/3, which people use, has four lengths.
        (published(2, 16, MOONLIGHT, 0), [0, 2, 1, 7], False),
        # The stage of the MTP layer has no transformer layer, and is not empty.
        (published(16, 64, DEEPSEEK, 0), [0, 4, 8, 3], False),
        # Without it, the even cut is as good as the best one, and is not given up for a longer one.
        (published(16, 32, NO_MTP, 1586), [0, 3, 2, 2], True),
    ],
    ids=["moonlight", "deepseek-v3", "deepseek-v3-without-mtp"],
)
def test_published_models_have_no_empty_stage_and_few_lengths(
    problem: LayeredProblem, most: list[int], is_even_kept: bool
) -> None:
    group = problem.pp_degree
    found = cut_for_executor(problem, "megatron", virtual_stages=[2], group=group, effort="quick").best
    assert found.problem.model is not None
    assert found.objective <= found.least * (1 + TOLERANCE) * (1 + 1e-9)
    assert irregularity(problem, found.problem.model.cut.bounds) <= most
    if is_even_kept:
        assert max(found.least, found.objective) <= found.even * (1 + 1e-9)
