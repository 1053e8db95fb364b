"""Layouts: what is enumerated, that bounds are bounds, and that the best of all layouts is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.executor_layouts import EXPERTS, MODEL, cluster_of, request_of
from zbv_models.layouts import progress
from zbv_models.layouts.answer import points_json, ranking_json
from zbv_models.layouts.cluster import parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, balanced, plan_layout
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.progress import Ends, LayoutProgress
from zbv_models.layouts.request import parse_request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.sensitivity import changes, nearest, outcomes
from zbv_solver.errors import InvalidInput

# --- enumeration


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"tensor_parallel": 2},
        {"context_parallel": 2, "expert_parallel": 4},
        {"data_parallel": 4, "zero_stage": 3},
        {"pipeline_parallel": 4, "placement": "tp-cp-pp-dp"},
        {"microbatch_size": 2, "recompute": "full"},
    ],
)
def test_layouts_use_all_devices_and_the_batch_and_fixed_parts_only_restrict_them(
    part: dict[str, Any],
) -> None:
    every, some = (request_of(EXPERTS, cluster_of(2, 4), 16, **fixed).layouts for fixed in ({}, part))
    assert len(set(some)) == len(some) > 8
    for each in some:
        of_rank = each.tensor_parallel * each.context_parallel * each.data_parallel
        assert of_rank * each.pipeline_parallel == 8
        assert each.data_parallel * each.microbatch_size * each.microbatches == 16
        assert (of_rank % each.expert_parallel, 4 % each.tensor_parallel) == (0, 0)
        assert all(getattr(each, name) == value for name, value in part.items())
    kind = part.get("recompute")
    # Where the order of groups makes no difference, the enumeration has the first one only.
    assert {replace(each, placement="tp-cp-dp-pp") for each in some} >= {
        replace(
            each, placement="tp-cp-dp-pp", **({"recompute": kind, "recompute_modules": ()} if kind else {})
        )
        for each in every
        if all(getattr(each, name) == value for name, value in part.items() if name != "recompute")
    }


@pytest.mark.parametrize("is_mixed", [False, True])
def test_families_have_every_layout_once_and_the_search_of_them_finds_the_same(is_mixed: bool) -> None:
    group = {"nodes": 1, "gpus_per_node": 2, "device": "h100", "memory": 12e9}
    groups = parse_cluster({"groups": [group, {**group, "device": "a100"}]})
    request = request_of(EXPERTS, groups if is_mixed else cluster_of(1, 4, 12.0), 8, microbatch_size=1)
    families, layouts = list(request.families()), request.layouts
    assert list(chain.from_iterable(families)) == layouts
    assert sum(map(len, families)) == len(layouts) == len(set(layouts)) > 2 * len(families)
    for family in families:
        bounds = [request.setting.least_work(layout) for layout in (family.first, *family)]
        assert bounds == pytest.approx([bounds[0]] * len(bounds), rel=1e-12)
    by_family = best_layouts(families, request.setting, 2)
    one_by_one = best_layouts(layouts, request.setting, 2)

    def known(ranking: Ranking) -> list[object]:
        found = [(each.layout, each.step_time, each.lower_bound) for each in ranking.every]
        numbers = sorted((number, each.is_tight) for each in ranking.waiting for number, _ in each.members())
        counts = ranking.considered, ranking.planned, ranking.pruned, ranking.unsettled
        points = points_json(ranking, request.setting)
        rows = {name: sorted(zip(*columns.values(), strict=True)) for name, columns in points.items()}
        return [found, numbers, counts, ranking.no_layout_below, rows, nearest(ranking, request.setting)]

    assert known(by_family) == known(one_by_one)


def test_large_clusters_have_few_families_and_large_numbers_are_enumerated_by_their_divisors() -> None:
    """Counting up to them would take hours."""
    cluster = parse_cluster({"nodes": 256, "gpus_per_node": 8, "device": "h100"})
    document = {"presets": ["deepseek-v3"], "global_batch": 15360, "sequence_length": 4096}
    sizes = list(map(len, parse_request(document, cluster).families()))
    assert sum(sizes) > 1_000_000 > 10 * len(sizes)
    model = {**MODEL, "experts": 99_999_989, "experts_per_token": 1}
    few = request_of(model, cluster_of(1, 2), 99_999_989)
    assert len(few.layouts) < 100
    assert sum(map(len, few.families(len(few.layouts)))) == len(few.layouts)
    with pytest.raises(InvalidInput, match=f"found more than {len(few.layouts) - 1} layouts of 2 devices"):
        list(few.families(len(few.layouts) - 1))


# --- bounds, and the search

LOADS = st.lists(st.tuples(st.floats(0.01, 1e3), st.floats(0.01, 1e3)), max_size=5)


@given(st.floats(0, 1e4), st.floats(0, 1e4), LOADS)
def test_the_balance_of_load_and_memory_is_least(
    load: float, wanted: float, items: list[tuple[float, float]]
) -> None:
    extra, saved = np.array(items).reshape(-1, 2).T
    found = balanced(load, wanted, extra, saved)
    shares = np.array(list(product(np.linspace(0, 1, 5), repeat=len(items))))
    some = np.maximum(load + shares @ extra, wanted - shares @ saved).min()
    assert load * (1 - 1e-9) <= found <= some * (1 + 1e-9) + 1e-12


def test_a_microbatch_alone_takes_the_time_of_all_layers() -> None:
    request = request_of(MODEL, cluster_of(1, 4), 1, pipeline_parallel=4, tensor_parallel=1)
    alone = EstimatedLayout.of(request.layouts[0], request.setting)
    assert alone.memory_bound > 2 * alone.mean_bound
    assert alone.memory_bound <= plan_layout(alone).step_time


def test_reports_lead_to_the_ranking_and_a_stopped_search_keeps_its_plans() -> None:
    request = request_of(MODEL, cluster_of(1, 4, 60.0), 8)
    reports: list[LayoutProgress] = []
    ranking = best_layouts(request.layouts, request.setting, report=reports.append)
    assert [each.step_time for each in reports if each.step_time is not None][-1] == ranking.best[0].step_time
    for earlier, later in pairwise(reports):
        assert earlier.no_layout_below <= later.no_layout_below * (1 + 1e-12)
        assert (earlier.planned, earlier.ruled_out) <= (later.planned, later.ruled_out)
        assert earlier.ruled_out <= later.ruled_out
    assert reports[-1].no_layout_below <= ranking.no_layout_below * (1 + 1e-12)
    assert {each.considered for each in reports} == {ranking.considered}
    at_once = best_layouts(request.layouts, request.setting, cancelled=lambda: True)
    assert (at_once.best, at_once.planned, at_once.pruned) == ((), 0, 0)
    assert 0 < at_once.no_layout_below <= ranking.no_layout_below
    first: list[LayoutProgress] = []
    asked: dict[str, Any] = {"top": 9, "report": first.append}
    stopped = best_layouts(
        request.layouts, request.setting, cancelled=lambda: any(each.planned for each in first), **asked
    )
    assert len(stopped.best) == 1
    assert stopped.considered == stopped.planned + stopped.pruned + stopped.unsettled
    assert stopped.unsettled > 0 == ranking.unsettled
    assert stopped.no_layout_below <= ranking.no_layout_below * (1 + 1e-12)


@pytest.mark.parametrize("executor", ["zbv", "megatron"])
def test_a_search_that_ends_during_the_enumeration_claims_no_bound(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.0)
    request = request_of(EXPERTS, cluster_of(2, 4), 16)
    read: list[object] = []

    def reading() -> Iterator[Any]:
        for layout in request.layouts:
            read.append(layout)
            yield layout

    def is_over() -> bool:
        return len(read) == 5

    if executor == "zbv":
        ranking = best_layouts(reading(), request.setting, cancelled=is_over)
    else:
        ranking = executor_layouts(reading(), request.setting, executor, cancelled=is_over)
    assert len(read) == 5, "it asks before every layout"
    assert (ranking.best, ranking.planned, ranking.no_layout_below) == ((), 0, 0.0)
    assert ranking.considered == ranking.unsettled < len(request.layouts)


def test_points_and_sensitivity_end_with_the_search() -> None:
    request = request_of(MODEL, cluster_of(1, 4), 8)
    ranking = best_layouts(request.families(), request.setting)
    every, few = (points_json(ranking, request.setting, lambda each=each: each) for each in (False, True))  # type: ignore[misc]
    assert every["planned"] == few["planned"]
    count = sum(len(of["step_time"]) for of in every.values())
    assert count == ranking.considered > sum(len(of["step_time"]) for of in few.values())
    assert list(outcomes(ranking, request, lambda: True)) == []
    left = iter(range(40))
    found = list(outcomes(ranking, request, lambda: next(left, None) is None))
    whole = list(islice(outcomes(ranking, request), len(found)))
    assert [(each.best, each.best_step_time) for each in found] == [
        (each.best, each.best_step_time) for each in whole
    ]
    assert len(found) < len(list(changes(request))), "it ended in the middle"
    for is_stopped in (False, True):
        for seconds in (None, 1000.0):
            assert Ends(partial(bool, is_stopped), seconds)() is is_stopped
    assert Ends(lambda: False, 0.0)()


# --- recomputation

PIPED: dict[str, Any] = {
    "pipeline_parallel": 2,
    "data_parallel": 1,
    "microbatch_size": 4,
    "tensor_parallel": 1,
}


def test_recomputation_is_chosen_where_memory_is_scarce() -> None:
    rows = []
    for gigabytes in (60.0, 4.5):
        request = request_of(MODEL, cluster_of(1, 2, gigabytes), 16, **PIPED)
        rows += ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
    assert [row["recompute"] for row in rows] == ["none", "per-stage"]
    assert rows[0]["step_time"] < rows[1]["step_time"]
    assert rows[1]["peak_memory"] <= 4.5e9
    assert 0 < rows[1]["model_flops_utilisation"] < rows[0]["model_flops_utilisation"] < 1
    assert all(rows[0]["partition"])


def test_selective_recomputation_is_another_layout() -> None:
    every = request_of(EXPERTS, cluster_of(1, 2, 60.0), 16, **PIPED)
    assert {each.recompute for each in every.layouts} == {"per-stage", "selective"}
    steps, held = [], []
    for kind in ("none", "selective", "full"):
        request = request_of(EXPERTS, cluster_of(1, 2, 60.0), 16, **PIPED, recompute=kind)
        ranking = best_layouts(request.layouts, request.setting)
        (best,), (row,) = ranking.best, ranking_json(ranking, request)["layouts"]
        block = best.estimated.problem.model.layers[1]
        assert (row["recompute"], block.recompute) == (kind, None)
        steps.append(best.step_time)
        held.append(block.costs.memory.forward)
    assert steps[0] < steps[1] < steps[2]
    assert held[0] > held[1] > held[2]


def test_a_dense_model_has_selective_layouts_where_they_are_asked_for() -> None:
    assert {each.recompute for each in request_of(MODEL, cluster_of(1, 2), 16).layouts} == {"per-stage"}
    asked = request_of(MODEL, cluster_of(1, 2), 16, recompute="selective").layouts
    assert {(each.recompute, "mlp" in each.recompute_modules) for each in asked} == {("selective", True)}
    named = request_of(MODEL, cluster_of(1, 2), 16, parallel={"recompute_modules": ["mlp"]}).layouts
    assert any(each.recompute == "selective" for each in named)


def test_prediction_modules_are_dropped_or_added() -> None:
    document = {"model": {**MODEL, "prediction_layers": 1}, "global_batch": 8}
    for count in (None, 0, 2):
        found = parse_request(document, cluster_of(1, 2), prediction_layers=count).setting.model
        assert found.prediction_layers == (1 if count is None else count)
