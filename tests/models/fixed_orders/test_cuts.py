"""All cuts of a few layers, the most regular of the good ones, and the score of a given one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import PUBLISHED, Document, layer, layered
from zbv_models.fixed_orders import order_search as orders
from zbv_models.fixed_orders.executor_cut import cut_for_executor, executor_cut_json
from zbv_models.fixed_orders.megatron_layout import write_layout
from zbv_models.fixed_orders.order_search import all_bounds, listed_cuts, proved_of
from zbv_models.fixed_orders.regular_cut import TOLERANCE, Once, irregularities, regular_cut
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_models.fixed_orders.score import score_layout
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.runs import WHOLE, First, Recomputed
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.assemble import OwnUnit
from zbv_solver.timing.start_times import evaluate

Bounds = tuple[int, ...]


def searched(problem: LayeredProblem, schedule: Schedule, again: Recomputed | First | None) -> Any:
    unit = OwnUnit.of(problem)
    return orders.order_search(unit, schedule, again, allow_empty=True, late=None, effort="quick")


SCHEDULES = (megatron_schedule(2, 4, 2), torch_schedule("1F1B", 3, 4), torch_schedule("ZBVZeroBubble", 2, 4))


def repeatable(times: list[int], backward: int | None, ranks: int, **more: Any) -> LayeredProblem:
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
    search = searched(repeatable(times, backward, schedule.placement.pp_degree, **cut), schedule, recompute)
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
    counts = runs.counts(search.best[0])
    exact = next(search.order.critical(*runs.costs(counts, runs.again(counts, search.best[1]))))
    (proved,) = proved_of(runs, [exact], np.array([search.best[0]]), search.best[1]).tolist()
    assert proved == pytest.approx(search.value)


@pytest.mark.parametrize("recompute", [None, (0, 0, 0), First()])
def test_it_is_proved_that_nothing_fits(recompute: Recomputed | First | None) -> None:
    search = searched(repeatable([1, 2, 3, 4, 5], None, 3, memory={"limit": 2.5}), SCHEDULES[1], recompute)
    search.bound_loads()
    assert search.is_infeasible, "by loads and memory, without a list of cuts"
    search.bound = 0.0
    search.finish(np.inf, 1.0)
    assert search.is_infeasible


def test_a_search_without_actions_claims_no_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(orders.ACTIONS, "quick", 0)
    search = searched(repeatable([1, 5, 1, 5, 1, 5], None, 2), SCHEDULES[0], (0,) * 4)
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


@settings(max_examples=12, deadline=None)
@given(
    times=st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.001, 1.004]), min_size=5, max_size=8),
    head=st.sampled_from([0.5, 1.5, 3.0]), limit=st.sampled_from([None, None, 30]),
    end=st.sampled_from([0.0, 2.0, 20.0]), fixed=st.sampled_from([0.0, 40.0]),
)  # fmt: skip
def test_most_regular(times: list[float], head: float, limit: float | None, end: float, fixed: float) -> None:
    """Ends that need long once per step may forbid the cut that is the most regular without them."""
    named = {"embedding": 0.25, **{f"block{at}": time for at, time in enumerate(times)}, "head": head}
    layers = [layer(name, time, held=time) for name, time in named.items()]
    problem = layered(2, 8, layers, placement="single", memory={"limit": limit})
    search = searched(problem, INTERLEAVED, (0,) * 4)
    search.seek_cut()
    search.finish(math.inf, 1.0)
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
    assert sorted(range(len(order)), key=order.__getitem__) == [4, 2, 3, 0, 5, 1]


@pytest.mark.parametrize(("microbatches", "p2p", "last", "most"), [
    # The stage of the MTP layer has no transformer layer, and is not empty.
    (64, 0, [layer("mtp", 12066, 15221, 10251), layer("head", 37066, 27494, 20855)], [0, 4, 8, 3]),
    # Without it, the even cut is as good as the best one, and is not given up for a longer one.
    (32, 1586, [layer("head", 18533, 13747, 10428)], [0, 3, 2, 2]),
])  # fmt: skip
def test_cuts_of_deepseek_v3(microbatches: int, p2p: float, last: Any, most: list[int]) -> None:
    blocks = layer("dense", 7236, 10498, 3827, repeat=3), layer("moe", 10858, 14056, 3924, repeat=58)
    problem = layered(16, microbatches, [layer("embedding", 88, 0, 5662), *blocks, *last], p2p)
    found: Any = cut_for_executor(problem, "megatron", virtual_stages=[2], group=16, effort="quick").best
    assert found.objective <= found.least * (1 + TOLERANCE) * (1 + 1e-9)
    assert irregularity(problem, found.problem.model.cut.bounds) <= most
    assert len(last) == 2 or max(found.least, found.objective) <= found.even * (1 + 1e-9)


def model_of(blocks: int, ranks: int, microbatches: int, mtp: int = 0, **more: Any) -> LayeredProblem:
    """Equal blocks, and a head that is as long as two of them; nothing is recomputed unless given."""
    ends = layer("embedding", 0.25, held=1), layer("head", 2, held=2)
    predicting = [layer("mtp", 1.25, held=4, repeat=mtp)] if mtp else []
    layers = [ends[0], layer("block", 1, held=4, repeat=blocks), *predicting, ends[1]]
    return layered(ranks, microbatches, layers, 0.125, placement="single", **more)


SCORED = {"dsv3-proxy-14L-pp4", "moe16L-pp2-selrecompute", "glm52-gb200-pp6-128k"}


@pytest.mark.parametrize("published", [each for each in PUBLISHED if each["id"] in SCORED])
def test_published_layouts_are_scored(published: Document) -> None:
    text, ranks = published["layout_string"], published["pp"]
    mtp = text.count("m") if published["format"] == "megatron" else 0
    problem = model_of(published["decoder_layers"], ranks, 2 * ranks, mtp)
    score: Any = score_layout(problem, "megatron", text, effort="quick")
    assert score.lower_bound <= score.objective * (1 + 1e-9)
    # Only a more regular cut that is hardly longer may be preferred to the given one.
    assert (score.gain(score.same) or 0) >= 0
    assert score.same.least <= min(score.objective, score.same.even) * (1 + 1e-9)
    assert score.overall.objective <= score.same.objective <= score.same.least * 1.01 * (1 + 1e-9)
    assert 0 < score.critical.sum() <= 1 + 1e-9
    assert math.isclose(score.busy.sum(), sum(map(score.problem.busy_time, range(ranks))))
    assert write_layout(score.stages) in (score.settings or "")


def recomputable(limit: float) -> LayeredProblem:
    """Eight blocks that need a quarter of their memory if they are recomputed."""
    held = {"forward": 4, "backward_input": 0, "backward_weight": -4, "static": 3}
    again = {"backward_input": 20, "memory": {**held, "forward": 1, "backward_input": 3}}
    block = layer("block", 10, repeat=8, recompute=again) | {"memory": held}
    return layered(2, 8, [layer("embedding", 1, 0, 1), block, layer("head", 12)], memory={"limit": limit})


@pytest.mark.parametrize(("problem", "executor", "chunks", "recompute"), [
    *((model_of(9, 2, 4), name, chunks, "none")
      for name in ("megatron", "torchtitan", "torch") for chunks in (1, 2)),
    (model_of(8, 2, 4, mtp=1), "megatron", 2, "none"),
    # It recomputes what the best cut may recompute: first layers, too.
    (recomputable(36), "megatron", 1, "block"),
    (recomputable(60), "megatron", 1, "none"),
])  # fmt: skip
def test_printed_cuts(problem: LayeredProblem, executor: str, chunks: int, recompute: str) -> None:
    found = cut_for_executor(problem, executor, virtual_stages=[chunks], effort="quick")
    best: Any = found.best
    assert best.results[0].recompute == recompute
    document = json.loads(json.dumps(executor_cut_json(found)))
    assert document["layers_per_stage"] == [len(stage) for stage in best.problem.model.partition]
    text = json.dumps([list(stage) for stage in best.problem.model.partition])
    if executor == "megatron" and recompute == "none":
        text = found.settings or ""
    score = score_layout(problem, executor, text, group=best.schedule.group, effort="quick")
    assert score.objective == pytest.approx(best.objective)
    assert score.gain(score.same) == 0
    assert (score.recompute, score.settings) == (recompute, found.settings)


def test_too_much_memory_is_a_finding_and_not_an_error() -> None:
    problem = model_of(8, 2, 4, memory={"limit": 40})
    score: Any = score_layout(problem, "megatron", "Et*6|ttL", effort="quick")
    assert score.too_full == (0,)
    assert score.timing.peak_memory[0] == 2 * (6 * 4 + 1)
    assert score.bottleneck == 0, "all of its work is on the longest paths"
    assert score.critical[0] > 2 * score.critical[1]
    assert score.gain(score.same) is None
    assert score.lower_bound <= score.objective
    none_fits = score_layout(model_of(8, 2, 4, memory={"limit": 10}), "megatron", "4,4", effort="quick")
    assert none_fits.same is none_fits.overall is None
    assert 0 < none_fits.lower_bound <= none_fits.objective


@pytest.mark.parametrize(("executor", "text", "cut", "pointer", "message"), [
    ("megatron", "t|tL", {}, "/layout", "the modules ttL"),
    ("torchtitan", "Ett||tt|ttL", {}, "/layout", "stage 1 is empty"),
    ("torch", "Ett||tt|ttL", {}, "/layout", "no layer in stage 1"),
    ("megatron", "Ett||tt|ttL", {"allow_empty": False}, "/cut/allow_empty", "empty stage"),
    ("megatron", "Ett|t*4L", {"first": 3}, "/cut/first", "2 transformer layers; the problem asks for 3"),
    ("megatron", "Et|tt|t|ttL", {"last": 3}, "/cut/last", "has 2 virtual stages"),
    ("megatron", "Et|ttt|t|tL", {"last": 4}, "/cut/last", "found 3 and 1 transformer layers"),
    ("megatron", "Et|t*5L", {"together": [["block.0", "block.1"]]}, "/cut/together",
     "between 'block.0' and 'block.1'"),
])  # fmt: skip
def test_broken_rules_are_named(executor: str, text: str, cut: Document, pointer: str, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        score_layout(model_of(6, 2, 4, cut=cut), executor, text, effort="quick")
    assert raised.value.issues[0].pointer == pointer
    assert message in raised.value.issues[0].detail


def test_stages_are_recomputed_only_if_the_cut_does_not_fit_otherwise() -> None:
    for limit, recompute, fits in ((60, "none", True), (22, "all", True), (9, "none", False)):
        score = score_layout(
            recomputable(limit), "megatron", "4,4", recompute="uniform", cancelled=lambda: True
        )
        assert (score.recompute, not score.too_full) == (recompute, fits)


GRANULARITY, STATIC = "--recompute-granularity full", 4 * 3
FLAGS = f"{GRANULARITY} --pipeline-model-parallel-layout Et*4|t*4L --recompute-method"


@pytest.mark.parametrize(("method", "count", "group", "peak"), [
    # With groups of 3, a stage of 4 blocks keeps 2 inputs, and computes 3 blocks at once.
    ("uniform", 1, None, STATIC + 2 * 4 * 1),
    ("uniform", 3, 3, STATIC + 2 * 2 * 1 + 2 * 4),
    ("uniform", 9, 9, STATIC + 2 * 1 * 1 + 3 * 4),
    ("block", 2, None, STATIC + 2 * (2 * 1 + 2 * 4)),
])  # fmt: skip
def test_flags_of_recomputation(method: str, count: int, group: int | None, peak: float) -> None:
    flags = f"{FLAGS} {method} --recompute-num-layers {count}"
    # The bound matters where layers are recomputed in groups, which no search for better cuts knows.
    is_over = None if group == 3 else lambda: True
    score = score_layout(recomputable(36), "megatron", flags, effort="quick", cancelled=is_over)
    assert (score.recompute_group, score.timing.peak_memory[0]) == (group, peak)
    assert score.recompute_layers == (count if method == "block" else None)
    assert score.busy.sum() == 8 * (2 + 8 * 30 + 36) + 8 * 10 * (8 if method == "uniform" else 4)
    assert f"--recompute-method {method}" in (score.settings or "")
    assert f"--recompute-num-layers {count}" in (score.settings or "")
    assert score.lower_bound <= score.objective * (1 + 1e-9)
    # The printed flags are a layout themselves, and the number of first layers can be fixed.
    fixed: Document = {"text": "4,4", "recompute_layers": count}
    fixed = {"text": score.settings or ""} if method == "uniform" else fixed
    same = score_layout(recomputable(36), "megatron", cancelled=lambda: True, **fixed)
    assert (same.objective, same.settings) == (score.objective, score.settings)


EMBEDDING, BLOCK, HEAD = recomputable(60).model.layers
PREDICTING = Model((EMBEDDING, BLOCK, replace(BLOCK, name="mtp", repeat=None), HEAD))


@pytest.mark.parametrize(("problem", "executor", "more", "message"), [
    (recomputable(60), "megatron", {"recompute": "all"}, "another flag that says what is recomputed"),
    (recomputable(60), "torchtitan", {}, "it is for megatron"),
    (model_of(8, 2, 4), "megatron", {}, "have no costs of full recomputation"),
    (replace(recomputable(60), model=PREDICTING), "megatron", {}, "groups of layers with multi-token predic"),
])  # fmt: skip
def test_wrong_flags(problem: LayeredProblem, executor: str, more: Document, message: str) -> None:
    flags = f"--num-layers 8 {GRANULARITY} --recompute-method uniform --recompute-num-layers 2"
    with pytest.raises(InvalidInput, match=message):
        score_layout(problem, executor, flags, effort="quick", **more)
