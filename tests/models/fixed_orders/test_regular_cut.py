"""All cuts of a few layers, what is proved of each, and the most regular of those that are hardly longer."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import layer, layered
from zbv_models.fixed_orders import order_search as orders
from zbv_models.fixed_orders.order_search import OrderSearch, all_bounds, listed_cuts, proved_of
from zbv_models.fixed_orders.regular_cut import TOLERANCE, Once, irregularities, regular_cut
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_solver.partition.runs import WHOLE, First, Recomputed
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.assemble import OwnUnit
from zbv_solver.timing.start_times import evaluate

Bounds = tuple[int, ...]


def searched(
    problem: LayeredProblem, schedule: Schedule, recompute: Recomputed | First | None
) -> OrderSearch:
    unit = OwnUnit.of(problem)
    return orders.order_search(unit, schedule, recompute, allow_empty=True, late=None, effort="quick")


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
    times=st.lists(st.integers(1, 5), min_size=5, max_size=7), backward=st.sampled_from([None, 1, 6]),
    schedule=st.sampled_from(SCHEDULES), is_filled=st.booleans(), share=st.floats(0.5, 2.0),
    recompute=st.sampled_from([None, First(), First(1, 2)]),
)  # fmt: skip
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
    most = share * search.bound / search.problem.microbatches
    tables = [table for table in (all_bounds(runs), all_bounds(runs, most)) if table is not None]
    every, kept = ([*map(tuple, table.tolist())] for table in tables)
    assert sorted(every) == sorted(allowed)
    assert all_bounds(runs, most=len(allowed) - 1) is None
    loads = {each: search.space.worst_load(search.space.cut(each, (False,) * stages)) for each in allowed}
    # Whole stages may have a cheaper fused backward than their layers one by one.
    assert set(kept) >= {bounds for bounds in allowed if loads[bounds] <= most}
    assert backward == 1 or max((loads[bounds] for bounds in kept), default=0) <= most * (1 + 1e-6)
    # No cut is shorter than what is proved of it.
    listed = list(listed_cuts(runs, recompute, search.tight_terms(), np.inf) or ())
    assert {bounds for _, (bounds, _) in listed} == allowed
    assert [bound for bound, _ in listed] == sorted(bound for bound, _ in listed)
    if recompute is None:
        assert {chosen for _, (_, chosen) in listed} == set(product((0, WHOLE), repeat=stages))
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


def test_a_search_without_actions_claims_no_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(orders.ACTIONS, "quick", 0)
    search = searched(recomputable([1, 5, 1, 5, 1, 5], None, 2), SCHEDULES[0], (0,) * 4)
    search.screen()
    consider = Mock(side_effect=search.local.consider)
    monkeypatch.setattr(search.local, "consider", consider)
    search.finish(math.inf, 1.0)
    assert consider.call_count <= 1
    assert search.bound < search.value


INTERLEAVED = torch_schedule("Interleaved1F1B", 2, 8, 2)


def irregularity(problem: LayeredProblem, bounds: Bounds) -> list[int]:
    """Of the cut with these boundaries between layers."""
    blocks = np.diff(np.array(problem.model.blocks_before)[list(bounds)])
    return [int(number) for number in irregularities(blocks[None], np.diff(bounds)[None])[0]]


@settings(max_examples=20, deadline=None)
@given(
    times=st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.001, 1.004]), min_size=5, max_size=8),
    head=st.sampled_from([0.5, 1.5, 3.0]), limit=st.sampled_from([None, None, 30]),
    end=st.sampled_from([0.0, 2.0, 20.0]), fixed=st.sampled_from([0.0, 40.0]),
)  # fmt: skip
def test_the_most_regular_of_good_cuts(
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
        timing = evaluate(cut, INTERLEAVED.orders())
        if np.all(timing.peak_memory <= np.array(cut.memory.limit or [math.inf])):
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
