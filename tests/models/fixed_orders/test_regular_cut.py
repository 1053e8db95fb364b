"""The most regular of the cuts that are hardly longer than the best one."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import layer, layered
from zbv_models.fixed_orders.best_cut import BestCut, best_cut
from zbv_models.fixed_orders.executor_cut import cut_for_executor
from zbv_models.fixed_orders.order_search import order_search
from zbv_models.fixed_orders.regular_cut import TOLERANCE, Once, irregularities, regular_cut
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.assemble import OwnUnit
from zbv_solver.timing.start_times import evaluate


def model_of(times: list[float], head: float, ranks: int, **more: Any) -> LayeredProblem:
    """Blocks with these times, and a head."""
    named = {"embedding": 0.25, **{f"block{at}": time for at, time in enumerate(times)}, "head": head}
    layers = [layer(name, time, held=time) for name, time in named.items()]
    return layered(ranks, 4 * ranks, layers, placement="single", **more)


def irregularity(best: BestCut, bounds: tuple[int, ...]) -> list[int]:
    assert best.problem.model is not None
    before = np.array(best.problem.model.model.blocks_before)
    found: list[int] = irregularities(np.diff(before[list(bounds)])[None], np.diff(np.array(bounds))[None])[
        0
    ].tolist()
    return found


def every_cut(problem: LayeredProblem, schedule: Schedule, best: BestCut) -> dict[tuple[int, ...], float]:
    """The span of every cut that fits, empty middle stages included."""
    n, placement = problem.model.n_layers, schedule.placement
    unlimited = best.problem.placement
    found = {}
    for inner in combinations_with_replacement(range(1, n), placement.n_stages - 1):
        bounds = (0, *inner, n)
        cut = problem.cut_into(unlimited, Cut.at(bounds))
        timing = evaluate(cut, schedule.orders())
        limit = cut.memory.limit
        if limit is None or all(a <= b for a, b in zip(timing.peak_memory, limit, strict=True)):
            found[bounds] = timing.span
    return found


blocks = st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.001, 1.004]), min_size=5, max_size=8)


@settings(max_examples=10, deadline=None)
@given(blocks, st.sampled_from([0.5, 1.5, 3.0]), st.sampled_from([None, 30]))
def test_of_the_cuts_that_fit_and_are_hardly_longer_it_is_the_most_regular(
    times: list[float], head: float, limit: float | None
) -> None:
    problem = model_of(times, head, 2, memory={"limit": limit})
    schedule = torch_schedule("Interleaved1F1B", 2, 8, 2)
    best = best_cut(problem, [schedule], allow_empty=True, effort="standard")
    cuts = every_cut(problem, schedule, best)
    assert best.problem.model is not None
    chosen, least = best.problem.model.cut.bounds, min(cuts.values())
    assert best.least == pytest.approx(least)
    assert cuts[chosen] == pytest.approx(best.objective)
    assert best.objective <= best.least * (1 + TOLERANCE) * (1 + 1e-9)
    good = [bounds for bounds, span in cuts.items() if span <= least * (1 + TOLERANCE) * (1 - 1e-9)]
    assert irregularity(best, chosen) <= min(irregularity(best, bounds) for bounds in good)


@settings(max_examples=10, deadline=None)
@given(blocks, st.sampled_from([0.0, 2.0, 20.0]), st.sampled_from([0.0, 40.0]))
def test_what_a_rank_does_once_per_step_counts_too(times: list[float], end: float, fixed: float) -> None:
    """Ends that need long once per step may forbid the cut that is the most regular without them."""
    problem = model_of(times, 1.5, 2)
    schedule = torch_schedule("Interleaved1F1B", 2, 8, 2)
    search = order_search(
        OwnUnit.of(problem), schedule, (0,) * 4, allow_empty=True, late=None, effort="standard"
    )
    search.seek_cut()
    search.finish(math.inf, 1.0)
    assert search.best is not None
    once = np.array([end, *(1.0 for _ in times), end]) * search.value / 100
    chosen, _ = regular_cut(search, Once(once, fixed * search.value / 100))

    def step(bounds: tuple[int, ...]) -> float:
        loads = np.add.reduceat(np.append(once, 0.0), bounds[:-1]) * (np.diff(bounds) > 0)
        most = max(loads[[0, 2]].sum(), loads[[1, 3]].sum())
        return float(search.runs.value(search.order, (bounds, (0,) * 4)) + most + fixed * search.value / 100)

    least, shortest = search.value, step(search.best[0])
    best = best_cut(problem, [schedule], allow_empty=True, effort="quick")
    good = {}
    for inner in combinations_with_replacement(range(1, len(once)), 3):
        bounds = (0, *inner, len(once))
        is_short = search.runs.value(search.order, (bounds, (0,) * 4)) <= least * (1 + TOLERANCE)
        if is_short and step(bounds) <= shortest * (1 + TOLERANCE):
            good[bounds] = irregularity(best, bounds)
    assert chosen in good
    assert good[chosen] == min(good.values())


def test_regular_means_few_empty_stages_then_few_lengths_then_few_changes_then_a_small_range() -> None:
    blocks = np.array([[7, 9, 8, 3], [0, 10, 15, 2], [8, 8, 8, 3], [8, 3, 8, 8], [8, 8, 8, 4], [9, 9, 9, 0]])
    order = irregularities(blocks, blocks).tolist()
    by_rank = sorted(range(len(order)), key=lambda at: order[at])
    assert by_rank == [4, 2, 3, 0, 5, 1]


def published(
    ranks: int, microbatches: int, layers: dict[str, tuple[int, float, float, float]], p2p: float = 0
) -> LayeredProblem:
    """Layers with a number of copies, and the times of F, I and W."""
    made = [layer(name, *times, repeat=copies) for name, (copies, *times) in layers.items()]
    return layered(ranks, microbatches, made, p2p)


MOONLIGHT = published(
    2,
    16,
    {
        "embedding": (1, 50, 0, 3053),
        "dense": (1, 1596, 2023, 1043),
        "moe": (26, 6966, 7394, 1091),
        "head": (1, 14013, 7680, 3787),
    },
)
DEEPSEEK_V3 = published(
    16,
    64,
    {
        "embedding": (1, 88, 0, 5662),
        "dense": (3, 7236, 10498, 3827),
        "moe": (58, 10858, 14056, 3924),
        "mtp": (1, 12066, 15221, 10251),
        "head": (1, 37066, 27494, 20855),
    },
)


@pytest.mark.parametrize(
    ("problem", "most"),
    [
        # 7/9/8/3, which people use, has four lengths.
        (MOONLIGHT, [0, 2, 1, 7]),
        # The stage of the MTP layer has no transformer layer, and is not empty.
        (DEEPSEEK_V3, [0, 4, 8, 3]),
    ],
    ids=["moonlight", "deepseek-v3"],
)
def test_published_models_have_no_empty_stage_and_few_lengths(
    problem: LayeredProblem, most: list[int]
) -> None:
    ranks = problem.pp_degree
    found = cut_for_executor(problem, "megatron", virtual_stages=[2], group=ranks, effort="quick").best
    assert found.problem.model is not None
    assert found.objective <= found.least * (1 + TOLERANCE) * (1 + 1e-9)
    assert irregularity(found, found.problem.model.cut.bounds) <= most


def test_the_executors_own_cut_is_not_given_up_for_a_longer_one() -> None:
    """Without its MTP layer, the even cut of DeepSeek-V3 is as good as the best one."""
    problem = published(
        16,
        32,
        {
            "embedding": (1, 88, 0, 8449),
            "dense": (3, 7236, 10498, 3827),
            "moe": (58, 10858, 14056, 3927),
            "head": (1, 18533, 13747, 10428),
        },
        p2p=1586,
    )
    found = cut_for_executor(problem, "megatron", virtual_stages=[2], group=16, effort="quick").best
    assert found.least <= found.even * (1 + 1e-9)
    assert found.objective <= found.even * (1 + 1e-9)


@pytest.mark.parametrize("experts", [16, 20, 26])
def test_no_cut_of_a_short_step_is_more_regular(experts: int) -> None:
    """With few microbatches, stages grow towards the end, so evenly dealt ones are too long."""
    problem = published(
        2,
        4,
        {
            "embedding": (1, 2, 0, 110),
            "dense": (1, 111, 143, 73),
            "moe": (experts, 194, 225, 76),
            "head": (1, 1000, 548, 270),
        },
        p2p=32,
    )
    schedule, model = megatron_schedule(2, 4, 3, 4), problem.model
    best = best_cut(problem, [schedule], allow_empty=True, effort="quick")
    assert best.problem.model is not None
    assert best.shortest.model is not None
    most = best.least * (1 + TOLERANCE) * (1 - 1e-9)
    cuts = np.array(
        [(0, *inner, model.n_layers) for inner in combinations_with_replacement(range(1, model.n_layers), 5)]
    )
    # A step takes at least the work of either rank.
    work = np.cumsum([0.0, *(layer.costs.forward + layer.costs.fused for layer in model.each)])
    cuts = cuts[4 * np.diff(work[cuts]).reshape(-1, 3, 2).sum(axis=1).max(axis=1) <= most]
    found = irregularities(np.diff(np.array(model.blocks_before)[cuts]), np.diff(cuts))

    def span(bounds: tuple[int, ...]) -> float:
        return evaluate(problem.cut_into(schedule.placement, Cut.at(bounds)), best.orders).span

    by_rank = np.lexsort(found.T[::-1]).tolist()
    first = next(found[at].tolist() for at in by_rank if span(tuple(cuts[at].tolist())) <= most)
    assert irregularity(best, best.problem.model.cut.bounds) == first
    assert irregularity(best, best.shortest.model.cut.bounds) > first
