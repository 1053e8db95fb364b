"""The score of a given cut: never below the bound, and no gain for the best cut."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose
from typing import Any

import pytest
from support.executor_layers import PUBLISHED, layer, layered
from zbv_models.fixed_orders.executor_cut import cut_for_executor, executor_cut_json
from zbv_models.fixed_orders.megatron_layout import write_layout
from zbv_models.fixed_orders.score import score_layout
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem

Document = dict[str, Any]


def model_of(blocks: int, ranks: int, microbatches: int, mtp: int = 0, **more: Any) -> LayeredProblem:
    """Equal blocks, and a head that is as long as two of them; nothing is recomputed unless given."""
    ends = layer("embedding", 0.25, held=1), layer("head", 2, held=2)
    predicting = [layer("mtp", 1.25, held=4, repeat=mtp)] if mtp else []
    layers = [ends[0], layer("block", 1, held=4, repeat=blocks), *predicting, ends[1]]
    return layered(ranks, microbatches, layers, 0.125, placement="single", **more)


NAMES = ["dsv3-proxy-14L-pp4", "moe16L-pp2-selrecompute", "moonlight16b-pp4vp1", "glm52-gb200-pp6-128k"]


@pytest.mark.parametrize("published", [each for each in PUBLISHED if each["id"] in NAMES], ids=NAMES)
def test_published_layouts_are_scored(published: Document) -> None:
    text, ranks = published["layout_string"], published["pp"]
    mtp = text.count("m") if published["format"] == "megatron" else 0
    problem = model_of(published["decoder_layers"], ranks, 2 * ranks, mtp)
    score = score_layout(problem, "megatron", text, effort="quick")
    assert score.lower_bound <= score.objective * (1 + 1e-9)
    assert score.same is not None
    assert score.overall is not None
    # Only a more regular cut that is hardly longer may be preferred to the given one.
    assert (score.gain(score.same) or 0) >= 0
    assert score.same.least <= min(score.objective, score.same.even) * (1 + 1e-9)
    assert score.overall.objective <= score.same.objective <= score.same.least * 1.01 * (1 + 1e-9)
    assert 0 < score.critical.sum() <= 1 + 1e-9
    assert isclose(score.busy.sum(), sum(map(score.problem.busy_time, range(ranks))))
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
def test_printed_cuts_gain_nothing(
    problem: LayeredProblem, executor: str, chunks: int, recompute: str
) -> None:
    found = cut_for_executor(problem, executor, virtual_stages=[chunks], effort="quick")
    best = found.best
    assert best.problem.model is not None
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
    score = score_layout(problem, "megatron", "Et*6|ttL", effort="quick")
    assert score.too_full == (0,)
    assert score.timing.peak_memory[0] == 2 * (6 * 4 + 1)
    assert score.bottleneck == 0, "all of its work is on the longest paths"
    assert score.critical[0] > 2 * score.critical[1]
    assert score.same is not None
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
        score = score_layout(recomputable(limit), "megatron", "4,4", recompute="uniform", effort="quick")
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
    score = score_layout(recomputable(36), "megatron", flags, effort="quick")
    assert (score.recompute_group, score.timing.peak_memory[0]) == (group, peak)
    assert score.recompute_layers == (count if method == "block" else None)
    assert score.busy.sum() == 8 * (2 + 8 * 30 + 36) + 8 * 10 * (8 if method == "uniform" else 4)
    assert f"--recompute-method {method}" in (score.settings or "")
    assert f"--recompute-num-layers {count}" in (score.settings or "")
    assert score.lower_bound <= score.objective * (1 + 1e-9)
    # The printed flags are a layout themselves, and the number of first layers can be fixed.
    fixed: Document = {"text": "4,4", "recompute_layers": count}
    fixed = {"text": score.settings or ""} if method == "uniform" else fixed
    same = score_layout(recomputable(36), "megatron", effort="quick", **fixed)
    assert (same.objective, same.settings) == (score.objective, score.settings)


def with_mtp() -> LayeredProblem:
    """Blocks and a module of multi-token prediction that can be recomputed."""
    problem = recomputable(60)
    embedding, block, head = problem.model.layers
    return replace(problem, model=Model((embedding, block, replace(block, name="mtp", repeat=None), head)))


@pytest.mark.parametrize(("problem", "executor", "more", "message"), [
    (recomputable(60), "megatron", {"recompute": "all"}, "another flag that says what is recomputed"),
    (recomputable(60), "torchtitan", {}, "it is for megatron"),
    (model_of(8, 2, 4), "megatron", {}, "have no costs of full recomputation"),
    (with_mtp(), "megatron", {}, "Megatron-LM refuses groups of layers with multi-token prediction"),
])  # fmt: skip
def test_wrong_flags_of_recomputation(
    problem: LayeredProblem, executor: str, more: Document, message: str
) -> None:
    flags = f"--num-layers 8 {GRANULARITY} --recompute-method uniform --recompute-num-layers 2"
    with pytest.raises(InvalidInput, match=message):
        score_layout(problem, executor, flags, effort="quick", **more)
