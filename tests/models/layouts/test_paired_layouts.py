"""Layouts whose forwards may run together with backwards: bounds, comparisons, answers and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from support.executor_layouts import EXPERTS, MODEL, Document, cluster_of, request_of
from zbv_models.estimate.device import GroupLink
from zbv_models.layouts.answer import composition, ranking_json
from zbv_models.layouts.compared_layout import MADE_FOR_PAIRS, ComparedLayout
from zbv_models.layouts.estimated_layout import EstimatedLayout, plan_layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_solver.commands.layout_tables import layout_table
from zbv_solver.errors import InvalidInput
from zbv_solver.verify.verifier import verify_orders

CLUSTER = replace(cluster_of(4, 2, processors=132), between_nodes=GroupLink(8.0, 20.0))
"""Nodes of two devices with a slow network, so that most tokens leave their node, and take long."""
PIPELINE: Document = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 2, "zero_stage": 1}


def request(pairs: str, **fixed: object) -> Request:
    return request_of(EXPERTS, CLUSTER, 32, parallel={"pairs": pairs}, **{**PIPELINE, **fixed})


@cache
def ranking(pairs: str) -> Ranking:
    asked = request(pairs, expert_parallel=4)
    return best_layouts(asked.families(), asked.setting)


def test_pairs_shorten_the_best_layout_and_what_it_is_compared_with_is_longer() -> None:
    best, alone = ranking("experts").best[0], ranking("none").best[0]
    assert isinstance(best, ComparedLayout)
    verify_orders(best.plan.problem, best.plan.orders)
    assert best.without_pairs is not None
    assert best.lower_bound <= best.step_time < 0.97 * best.without_pairs.step_time
    assert {each.name for each in best.baselines} <= set(MADE_FOR_PAIRS)
    assert [each for each in best.baselines if each.fits]
    assert all(best.step_time <= each.step_time * (1 + 1e-9) for each in best.baselines if each.fits)
    assert best.step_time <= alone.step_time
    assert composition(alone)["expert_parallel"] > composition(best)["expert_parallel"] >= 0


@pytest.mark.parametrize("pairs", ["experts", "all"])
@pytest.mark.parametrize("expert", [1, 4])
def test_bounds_and_parts_of_a_step_hold_with_pairs(pairs: str, expert: int) -> None:
    asked = request(pairs, expert_parallel=expert, tensor_parallel=2, microbatch_size=2)
    for layout in asked.layouts[:2]:
        estimated = EstimatedLayout.of(layout, asked.setting)
        planned = plan_layout(estimated)
        for bound in (estimated.mean_bound, estimated.load_bound, estimated.memory_bound):
            assert bound <= planned.step_time * (1 + 1e-9)
        assert asked.setting.least_work(layout) <= estimated.mean_bound * (1 + 1e-9)
        assert estimated.problem.has_pairs == (expert > 1 or pairs == "all")
        parts = composition(planned)
        assert sum(parts.values()) == pytest.approx(planned.step_time, rel=1e-9)
        assert min(parts.values()) >= -1e-9 * planned.step_time


def test_the_answer_and_the_table_say_what_pairs_save() -> None:
    asked, found = request("experts", expert_parallel=4), ranking("experts")
    (layout,) = json.loads(json.dumps(ranking_json(found, asked)))["layouts"]
    pairs, best = layout["pairs"], found.best[0]
    assert 0 < pairs["paired"] <= pairs["forwards"]
    assert pairs["factor"] == pytest.approx(132 / 112)
    assert pairs["saved"] > 0
    assert pairs["step_time_without"] > layout["step_time"]
    rows = [str(cell) for cell in layout_table(found, asked).columns[0].cells]
    assert rows[-len(pairs["baselines"]) :] == [f"step of {each['name']}" for each in pairs["baselines"]]
    (plain,) = ranking_json(ranking("none"), request("none", expert_parallel=4))["layouts"]
    assert "pairs" not in plain
    assert isinstance(best, ComparedLayout)


def test_a_layout_with_little_memory_has_no_baseline_that_does_not_fit() -> None:
    roomy = ranking("experts").best[0]
    asked = request("experts", expert_parallel=4, microbatch_size=roomy.layout.microbatch_size)
    peaks = max(roomy.plan.metrics.peak_memory)
    tight = replace(asked, cluster=replace(CLUSTER, memory=0.9 * peaks, size=0.9 * peaks))
    found = best_layouts(tight.families(), tight.setting).best[0]
    assert isinstance(found, ComparedLayout)
    assert max(found.plan.metrics.peak_memory) <= 0.9 * peaks * (1 + 1e-9)
    assert found.step_time >= roomy.step_time * (1 - 1e-9)


@pytest.mark.parametrize(
    ("model", "executor", "pairs", "words"),
    [(MODEL, "zbv", "experts", "no all-to-all"), (EXPERTS, "megatron", "experts", "executor megatron")],
)
def test_pairs_that_no_order_has_are_refused(model: Document, executor: str, pairs: str, words: str) -> None:
    asked = request_of(model, CLUSTER, 32, executor, parallel={"pairs": pairs})
    with pytest.raises(InvalidInput, match=words) as error:
        list(asked.families())
    assert error.value.issues[0].pointer == "/parallel/pairs"
