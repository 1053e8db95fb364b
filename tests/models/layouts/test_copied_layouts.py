"""Layouts whose plans may copy activations to the host: bounds, comparisons, answers and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.executor_layouts import EXPERTS, MODEL, Document, cluster_of, request_of
from zbv_models.estimate.device import GroupLink
from zbv_models.layouts.answer import composition, memory_of_ranks, ranking_json
from zbv_models.layouts.compared_layout import ComparedLayout
from zbv_models.layouts.estimated_layout import EstimatedLayout, PlannedLayout, least_memory, plan_layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.sensitivity import outcomes
from zbv_solver.commands.layout_tables import COPY_ROWS, PAIR_ROWS, layout_table
from zbv_solver.errors import InvalidInput
from zbv_solver.verify.verifier import verify_orders

DEEP = {**MODEL, "layers": 16, "vocabulary": 1000}
CLUSTER = replace(cluster_of(1, 4, 1.9, host_bandwidth=200.0, host_latency=5.0), host_memory=8e9)
"""Devices with little memory, whose layers compute twice as long as a copy of what they keep takes."""
SMALL = replace(CLUSTER, memory=1.5e9, size=1.5e9)
DEVICES: Document = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 4}
PIPELINE: Document = {**DEVICES, "microbatch_size": 1}
NOTHING_AGAIN: Document = {**PIPELINE, "recompute": "none"}


def request(copies: str = "activations", **fixed: object) -> Request:
    return request_of(DEEP, CLUSTER, 32, parallel={"copies": copies}, **{**NOTHING_AGAIN, **fixed})


def test_copies_shorten_the_best_layout_and_the_answer_says_what_they_save() -> None:
    asked, plain = request(), request("none")
    ranking, alone = (best_layouts(each.families(), each.setting) for each in (asked, plain))
    best = ranking.best[0]
    assert isinstance(best, ComparedLayout)
    verify_orders(best.plan.problem, best.plan.orders)
    assert best.without_copies is not None
    assert best.lower_bound <= best.step_time < 0.9 * alone.best[0].step_time
    assert best.without_copies.step_time == alone.best[0].step_time
    (layout,) = json.loads(json.dumps(ranking_json(ranking, asked)))["layouts"]
    copies = layout["copies"]
    assert 0 < copies["copied"] < copies["forwards"]
    assert 0 < max(copies["on_host"]) <= 2e9  # a fourth of the node's 8 GB
    assert best.estimated.problem.host_limit == (2e9,) * 4
    assert copies["step_time_without"] == alone.best[0].step_time
    assert [sum(row.values()) for row in memory_of_ranks(best)] == pytest.approx(
        best.plan.metrics.peak_memory
    )
    assert sum(composition(best).values()) == pytest.approx(best.step_time, rel=1e-9)
    cells = {
        str(row): str(cell)
        for row, cell in zip(*(each.cells for each in layout_table(ranking, asked).columns), strict=True)
    }
    assert cells["forwards copied to the host"] == f"{copies['copied']} of {copies['forwards']}"
    (without,) = ranking_json(alone, plain)["layouts"]
    assert "copies" not in without


def test_the_bandwidth_to_the_host_is_changed_where_plans_may_have_copies() -> None:
    found = {}
    for asked in (request(), request("none")):
        ranking = best_layouts(asked.layouts, asked.setting)
        found[asked.setting.copies] = {
            each.factor: each.step_time for each in outcomes(ranking, asked) if each.of == "host_bandwidth"
        }
    steps = found["activations"]
    assert list(steps) == [0.5, 2.0]
    half, twice = steps.values()
    assert half is not None
    assert twice is not None
    assert half > twice
    assert not found["none"]


def test_more_bandwidth_and_memory_never_lengthen_the_step() -> None:
    """A search for more bandwidth may find a longer order; that of the layout before still runs."""
    asked = request_of(DEEP, SMALL, 32, parallel={"copies": "activations"}, **NOTHING_AGAIN)
    ranking = best_layouts(asked.layouts, asked.setting)
    base = ranking.best[0].step_time
    more = [each for each in outcomes(ranking, asked) if each.of != "global_batch" and each.factor > 1]
    assert {each.of for each in more} >= {"in_node_bandwidth", "host_bandwidth", "memory"}
    for each in more:
        assert each.step_time is not None
        assert each.step_time <= base * (1 + 1e-9), each


def test_a_faster_link_to_the_host_alone_shortens_a_first_plan() -> None:
    """Of the cuts, the one whose first order is the shortest need not have the shortest one in the end."""
    steps = []
    for host in (200.0, 400.0):
        made = cluster_of(1, 4, 1.9, host_bandwidth=host, host_latency=5.0)
        cluster = replace(made, host_memory=8e9, memory=1.5e9, size=1.5e9)
        asked = request_of(DEEP, cluster, 32, parallel={"copies": "activations"}, **NOTHING_AGAIN)
        steps.append(best_layouts(asked.layouts, asked.setting).best[0].step_time)
    assert steps[1] < 0.9 * steps[0]


def test_a_layout_may_fit_with_copies_alone() -> None:
    asked = request_of(DEEP, SMALL, 32, parallel={"copies": "activations"}, **NOTHING_AGAIN)
    best = best_layouts(asked.families(), asked.setting).best[0]
    assert isinstance(best, ComparedLayout)
    assert best.without_copies is None
    (layout,) = ranking_json(best_layouts(asked.families(), asked.setting), asked)["layouts"]
    assert layout["copies"]["step_time_without"] is None


def test_pairs_and_copies_together_save_more_than_either() -> None:
    slow = cluster_of(4, 2, 5.0, processors=132, host_bandwidth=200.0, host_latency=5.0)
    slow = replace(slow, between_nodes=GroupLink(8.0, 20.0))
    fixed = {**PIPELINE, "pipeline_parallel": 2, "expert_parallel": 4, "zero_stage": 1}
    fixed |= {"microbatch_size": 2, "recompute": "none"}
    steps = {}
    for pairs, copies in (("experts", "activations"), ("experts", "none"), ("none", "activations")):
        asked = request_of(EXPERTS, slow, 32, parallel={"pairs": pairs, "copies": copies}, **fixed)
        ranking = best_layouts(asked.families(), asked.setting)
        (best,) = ranking.best
        assert isinstance(best, ComparedLayout)
        verify_orders(best.plan.problem, best.plan.orders)
        steps[pairs, copies] = best.step_time
        (layout,) = ranking_json(ranking, asked)["layouts"]
        assert [name for name in ("pairs", "copies") if name in layout] == [
            name for name, choice in (("pairs", pairs), ("copies", copies)) if choice != "none"
        ]
        if (pairs, copies) == ("experts", "activations"):
            both = best
            rows = [str(cell) for cell in layout_table(ranking, asked).columns[0].cells]
            assert {*PAIR_ROWS, *COPY_ROWS} <= set(rows)
    assert both.without_pairs is not None
    assert both.without_copies is not None
    others = [steps["none", "activations"], steps["experts", "none"]]
    assert [both.without_pairs.step_time, both.without_copies.step_time] == others
    assert both.lower_bound <= both.step_time < 0.95 * min(others)
    assert both.copied > 0
    assert both.plan.orders.paired is not None


@pytest.mark.parametrize("recompute", ["none", "per-stage", "full"])
def test_bounds_hold_with_copies(recompute: str) -> None:
    asked = request(recompute=recompute)
    for layout in asked.layouts[:1]:
        estimated = EstimatedLayout.of(layout, asked.setting)
        planned = plan_layout(estimated)
        for bound in (estimated.mean_bound, estimated.load_bound, estimated.memory_bound):
            assert bound <= planned.step_time * (1 + 1e-9)
        assert least_memory(estimated) <= max(planned.plan.metrics.peak_memory)


def test_what_copies_cannot_be_combined_with_is_refused() -> None:
    for parallel, cluster, executor, pointer in (
        ({"copies": "activations"}, CLUSTER, "megatron", "/parallel/copies"),
        ({"copies": "activations"}, cluster_of(1, 4), "zbv", "/device/host_bandwidth"),
    ):
        asked = request_of(EXPERTS, cluster, 16, executor, parallel=parallel, **PIPELINE)
        with pytest.raises(InvalidInput) as error:
            best_layouts(asked.families(), asked.setting)
        assert error.value.issues[0].pointer == pointer


def test_a_plan_without_copies_is_its_own_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of the layout without copies may find less, and then it does not count."""

    def worse(*arguments: Any) -> PlannedLayout:
        found = plan_layout(*arguments)
        return replace(found, step_time=2 * found.step_time)

    monkeypatch.setattr("zbv_models.layouts.compared_layout.plan_layout", worse)
    roomy = replace(CLUSTER, memory=8e9, size=8e9, host_memory=None)
    asked = request_of(DEEP, roomy, 32, parallel={"copies": "activations"}, **NOTHING_AGAIN)
    best = best_layouts(asked.families(), asked.setting).best[0]
    assert isinstance(best, ComparedLayout)
    assert best.without_copies is not None
    assert (best.copied, best.without_copies.step_time) == (0, best.step_time)
    assert best.plan.problem.copies is not None
    assert best.plan.problem.copies.host_limit is None
