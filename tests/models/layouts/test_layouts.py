"""Layouts: what is enumerated, that bounds are bounds, and that the best of all layouts is found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layouts import EXPERTS, MODEL, cluster_of
from support.rankings import check_ranking
from zbv_models.layouts import progress
from zbv_models.layouts.answer import points_json, ranking_json
from zbv_models.layouts.cluster import Cluster, equal_cluster, parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, balanced, plan_layout
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.layout import Fixed, Layout, Order, Recompute
from zbv_models.layouts.progress import Ends, LayoutProgress
from zbv_models.layouts.request import Request, parse_request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.sensitivity import changes, nearest, outcomes
from zbv_solver.errors import InvalidInput
from zbv_solver.search.options import SearchOptions

LINKS = {
    "in_node": {"latency": 10, "bandwidth": 300},
    "between_nodes": {"latency": 20, "bandwidth": 25},
}


def request_of(model: dict[str, Any], cluster: Cluster, batch: int, fixed: Fixed | None = None) -> Request:
    return parse_request({"model": model, "global_batch": batch}, cluster, fixed)


def test_every_layout_uses_all_devices_and_the_whole_batch() -> None:
    request = request_of(EXPERTS, cluster_of(2, 4), 16)
    layouts = request.layouts
    assert len(set(layouts)) == len(layouts) > 100
    for each in layouts:
        of_rank = each.tensor_parallel * each.context_parallel * each.data_parallel
        assert of_rank * each.pipeline_parallel == 8
        assert each.data_parallel * each.microbatch_size * each.microbatches == 16
        assert of_rank % each.expert_parallel == 0
        assert 4 % each.tensor_parallel == 0


@pytest.mark.parametrize(
    "part",
    [
        {"tensor_parallel": 2},
        {"context_parallel": 2, "expert_parallel": 4},
        {"data_parallel": 4, "zero_stage": 3},
        {"pipeline_parallel": 4, "placement": "tp-cp-pp-dp"},
        {"microbatch_size": 2, "recompute": "full"},
    ],
)
def test_a_fixed_part_restricts_the_enumeration_and_nothing_else(part: dict[str, Any]) -> None:
    cluster = cluster_of(2, 4)
    every = request_of(EXPERTS, cluster, 16).layouts
    some = request_of(EXPERTS, cluster, 16, Fixed(**part)).layouts
    recompute = part.pop("recompute", None)
    expected = {
        each if recompute is None else replace(each, recompute=recompute, recompute_modules=())
        for each in every
        if all(getattr(each, name) == value for name, value in part.items())
    }
    # Where the order of groups makes no difference, the enumeration has the first one only.
    assert {replace(each, placement="tp-cp-dp-pp") for each in some} >= {
        replace(each, placement="tp-cp-dp-pp") for each in expected
    }
    assert all(getattr(each, name) == value for each in some for name, value in part.items())


def test_groups_use_the_link_that_they_cross() -> None:
    cluster = cluster_of(2, 4)
    layout = Layout(2, 1, 1, 2, 2, 1, 8, 1, "per-stage", "tp-cp-dp-pp")
    near = layout.links(cluster)
    assert (near.tensor.bandwidth, near.data.bandwidth, near.pipeline.bandwidth) == (300, 300, 25)
    far = replace(layout, placement="tp-cp-pp-dp").links(cluster)
    assert (far.tensor.bandwidth, far.data.bandwidth, far.pipeline.bandwidth) == (300, 25, 300)


@pytest.mark.parametrize(
    ("nodes", "tensor", "context", "data", "expert", "placement", "bandwidths"),
    [
        (2, 1, 1, 8, 1, "tp-cp-dp-pp", (300, 100, 100)),
        (2, 2, 1, 4, 1, "tp-cp-dp-pp", (300, 50, 100)),
        (2, 2, 2, 2, 2, "tp-cp-dp-pp", (300, 50, 50)),
        (2, 4, 1, 2, 4, "tp-cp-dp-pp", (300, 25, 25)),
        (2, 8, 1, 1, 1, "tp-cp-dp-pp", (100, 300, 100)),
        (2, 1, 1, 8, 2, "tp-cp-dp-pp", (300, 100, 50)),
        (2, 1, 1, 8, 8, "tp-cp-dp-pp", (300, 100, 300)),
        (4, 1, 1, 8, 1, "tp-cp-pp-dp", (300, 50, 50)),
        (3, 1, 3, 4, 1, "tp-cp-dp-pp", (300, 100, 100)),
        (3, 6, 1, 2, 1, "tp-cp-dp-pp", (50, 25, 100)),
    ],
)
def test_rings_leave_a_node_by_a_link_for_each_of_their_devices_there(
    nodes: int, tensor: int, context: int, data: int, expert: int, placement: Order,
    bandwidths: tuple[float, float, float],
) -> None:  # fmt: skip
    ranks = 4 * nodes // (tensor * context * data)
    layout = Layout(tensor, context, expert, data, ranks, 1, 8, 1, "per-stage", placement)
    links = layout.links(cluster_of(nodes, 4))
    assert (links.tensor.bandwidth, links.data.bandwidth, links.expert_data.bandwidth) == bandwidths


def test_a_ring_is_not_faster_than_the_link_inside_its_nodes() -> None:
    cluster = cluster_of(2, 4)
    slow = replace(cluster, in_node=replace(cluster.in_node, bandwidth=60.0))
    layout = Layout(1, 1, 1, 8, 1, 1, 8, 1, "per-stage", "tp-cp-dp-pp")
    assert layout.links(slow).data.bandwidth == 60
    assert replace(layout, tensor_parallel=4, data_parallel=2).links(slow).data.bandwidth == 25
    odd = Layout(1, 1, 4, 20, 1, 1, 8, 1, "per-stage", "tp-cp-dp-pp")
    assert odd.links(cluster_of(2, 10)).expert_data.bandwidth == 25  # five devices, two on each node or less


@pytest.mark.parametrize(("placement", "near"), [("tp-cp-dp-pp", 4), ("tp-cp-pp-dp", 2)])
def test_the_nearest_devices_share_experts(placement: Order, near: int) -> None:
    layout = Layout(2, 1, 8, 4, 2, 1, 8, 1, "per-stage", placement)
    assert layout.degrees(cluster_of(4, 4)).expert_in_node == near


def test_rings_on_a_node_have_the_latency_of_a_step_unless_the_link_is_given() -> None:
    layout = Layout(4, 1, 1, 2, 2, 1, 8, 1, "per-stage", "tp-cp-dp-pp")
    document = {"nodes": 2, "gpus_per_node": 8, "device": "h100"}
    slow = {"latency": 1.0, "bandwidth": 100.0}
    given = {**document, "links": {"in_node": slow, "between_nodes": slow}}
    assert layout.links(equal_cluster(document)).tensor.step_latency == 3.4
    assert layout.links(equal_cluster(given)).tensor.step_latency == 0
    across = replace(layout, tensor_parallel=16, data_parallel=1, pipeline_parallel=1)
    found = across.links(equal_cluster(document)).tensor
    # One of 15 steps leaves a node.
    assert found.step_latency == pytest.approx((14 * 3.4 + 20) / 15)


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


CASES = st.tuples(
    st.sampled_from([(1, 2), (2, 2), (3, 1)]),
    st.sampled_from([MODEL, EXPERTS]),
    st.floats(3.0, 60.0),
    st.sampled_from([512, 2048]),
    st.booleans(),
)


@settings(max_examples=4)
@given(CASES)
def test_the_best_layout_is_that_of_planning_every_one(
    case: tuple[tuple[int, int], dict[str, Any], float, int, bool],
) -> None:
    (nodes, gpus), model, gigabytes, sequence, is_tied = case
    model = {**model, "sequence": sequence, "tied_embeddings": is_tied}
    batch = 3 * nodes * gpus
    request = request_of(
        model, cluster_of(nodes, gpus, gigabytes), batch, Fixed(zero_stage=1, microbatch_size=3)
    )
    check_ranking(request)


def test_reports_lead_to_the_ranking_and_a_stopped_search_keeps_its_plans() -> None:
    request = request_of(MODEL, cluster_of(1, 4, 60.0), 8, Fixed())
    reports: list[LayoutProgress] = []
    ranking = best_layouts(request.layouts, request.setting, report=reports.append)
    assert [each.step_time for each in reports if each.step_time is not None][-1] == ranking.best[0].step_time
    for earlier, later in pairwise(reports):
        assert earlier.no_layout_below <= later.no_layout_below * (1 + 1e-12)
        assert earlier.planned <= later.planned
        assert earlier.ruled_out <= later.ruled_out
    assert reports[-1].no_layout_below <= ranking.no_layout_below * (1 + 1e-12)
    assert {each.considered for each in reports} == {ranking.considered}
    at_once = best_layouts(request.layouts, request.setting, options=SearchOptions(), cancelled=lambda: True)
    assert (at_once.best, at_once.planned, at_once.pruned) == ((), 0, 0)
    assert 0 < at_once.no_layout_below <= ranking.no_layout_below
    first: list[LayoutProgress] = []
    stopped = best_layouts(
        request.layouts,
        request.setting,
        top=9,
        cancelled=lambda: any(each.planned for each in first),
        report=first.append,
    )
    assert len(stopped.best) == 1
    assert stopped.considered == stopped.planned + stopped.pruned + stopped.unsettled
    assert stopped.unsettled > 0 == ranking.unsettled
    assert stopped.no_layout_below <= ranking.no_layout_below * (1 + 1e-12)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_families_have_every_layout_once_and_the_search_of_them_finds_the_same(is_mixed: bool) -> None:
    group = {"nodes": 1, "gpus_per_node": 2, "device": "h100", "memory": 12e9}
    slow = {**group, "device": "a100"}
    cluster = parse_cluster({"groups": [group, slow]}) if is_mixed else cluster_of(1, 4, 12.0)
    request = parse_request({"model": EXPERTS, "global_batch": 8}, cluster)
    families, layouts = list(request.families()), request.layouts
    assert list(chain.from_iterable(families)) == layouts
    assert sum(map(len, families)) == len(layouts) == len(set(layouts)) > 2 * len(families)
    for family in families:
        for layout in family:
            bound = request.setting.least_work(layout)
            assert bound == pytest.approx(request.setting.least_work(family.first), rel=1e-12)
    by_family = best_layouts(families, request.setting, 2)
    one_by_one = best_layouts(layouts, request.setting, 2)

    def known(ranking: Ranking) -> list[object]:
        found = [(each.layout, each.step_time, each.lower_bound) for each in ranking.every]
        numbers = sorted((number, each.is_tight) for each in ranking.waiting for number, _ in each.members())
        counts = ranking.considered, ranking.planned, ranking.pruned, ranking.unsettled
        return [found, numbers, counts, ranking.no_layout_below]

    def rows(ranking: Ranking) -> dict[str, list[Any]]:
        points = points_json(ranking, request.setting)
        return {name: sorted(zip(*columns.values(), strict=True)) for name, columns in points.items()}

    assert known(by_family) == known(one_by_one)
    assert rows(by_family) == rows(one_by_one)
    assert nearest(by_family, request.setting) == nearest(one_by_one, request.setting)


def test_a_million_layouts_are_few_families() -> None:
    cluster = parse_cluster({"nodes": 256, "gpus_per_node": 8, "device": "h100"})
    document = {"presets": ["deepseek-v3"], "global_batch": 15360, "sequence_length": 4096}
    sizes = list(map(len, parse_request(document, cluster).families()))
    assert sum(sizes) > 1_000_000 > 10 * len(sizes)


def test_a_search_that_ends_during_the_enumeration_claims_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.0)
    request = request_of(EXPERTS, cluster_of(2, 4), 16)
    for executor, layouts in (("zbv", request.families()), ("megatron", iter(request.layouts))):
        read: list[object] = []

        def reading(each: Iterable[Any], seen: list[object] = read) -> Iterator[Any]:
            for layout in each:
                seen.append(layout)
                yield layout

        def is_over(seen: list[object] = read) -> bool:
            return len(seen) == 5

        if executor == "zbv":
            ranking = best_layouts(reading(layouts), request.setting, cancelled=is_over)
        else:
            ranking = executor_layouts(reading(layouts), request.setting, executor, cancelled=is_over)
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
    asked: list[None] = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) > 40

    found = list(outcomes(ranking, request, is_over))
    whole = list(islice(outcomes(ranking, request), len(found)))
    assert [(each.best, each.best_step_time) for each in found] == [
        (each.best, each.best_step_time) for each in whole
    ]
    assert len(found) < len(list(changes(request))), "it ended in the middle"


def test_a_search_ends_on_request_or_after_its_time_limit() -> None:
    asked: list[int] = []
    assert not Ends(lambda: bool(asked))()
    assert not Ends(lambda: bool(asked), 1000.0)()
    assert Ends(lambda: bool(asked), 0.0)()
    asked.append(1)
    assert Ends(lambda: bool(asked))()


def test_recomputation_is_chosen_where_memory_is_scarce() -> None:
    fixed = Fixed(pipeline_parallel=2, data_parallel=1, microbatch_size=4, tensor_parallel=1)
    rows = []
    for gigabytes in (60.0, 4.5):
        request = request_of(MODEL, cluster_of(1, 2, gigabytes), 16, fixed)
        (row,) = ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
        rows.append(row)
    assert [row["recompute"] for row in rows] == ["none", "per-stage"]
    assert rows[0]["step_time"] < rows[1]["step_time"]
    assert rows[1]["peak_memory"] <= 4.5e9
    assert 0 < rows[1]["model_flops_utilisation"] < rows[0]["model_flops_utilisation"] < 1
    assert prod(map(len, rows[0]["partition"])) > 0


def test_selective_recomputation_is_another_layout() -> None:
    fixed = Fixed(pipeline_parallel=2, data_parallel=1, microbatch_size=4, tensor_parallel=1)
    cluster = cluster_of(1, 2, 60.0)
    every = request_of(EXPERTS, cluster, 16, fixed)
    assert {each.recompute for each in every.layouts} == {"per-stage", "selective"}
    steps, problems = {}, {}
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for kind in kinds:
        request = request_of(EXPERTS, cluster, 16, replace(fixed, recompute=kind))
        ranking = best_layouts(request.layouts, request.setting)
        (best,), (row,) = ranking.best, ranking_json(ranking, request)["layouts"]
        assert row["recompute"] == kind
        steps[kind] = best.step_time
        problems[kind] = best.estimated.problem.model.layers[1]
    assert steps["none"] < steps["selective"] < steps["full"]
    held = {kind: layer.costs.memory.forward for kind, layer in problems.items()}
    assert held["none"] > held["selective"] > held["full"]
    assert all(layer.recompute is None for layer in problems.values())


def test_a_dense_model_has_selective_layouts_where_they_are_asked_for() -> None:
    cluster, selective = cluster_of(1, 2), Fixed(recompute="selective")
    assert {each.recompute for each in request_of(MODEL, cluster, 16).layouts} == {"per-stage"}
    asked = request_of(MODEL, cluster, 16, selective).layouts
    assert {(each.recompute, "mlp" in each.recompute_modules) for each in asked} == {("selective", True)}
    document = {"model": MODEL, "parallel": {"recompute_modules": ["mlp"]}, "global_batch": 16}
    assert any(each.recompute == "selective" for each in parse_request(document, cluster).layouts)
    document["parallel"] = {"recompute_modules": ["moe_act"]}
    with pytest.raises(InvalidInput, match="found moe_act; no layer of this model has them"):
        parse_request(document, cluster, selective).layouts  # noqa: B018


@pytest.mark.parametrize(
    ("fixed", "executor", "message"),
    [
        (Fixed(recompute_layers=2), "zbv", "executor zbv, which recomputes whole stages"),
        (Fixed(recompute_layers=2, recompute="none"), "megatron", "2 recomputed layers and recompute none"),
    ],
)
def test_a_number_of_recomputed_layers_needs_megatron_and_full_recomputation(
    fixed: Fixed, executor: str, message: str
) -> None:
    request = replace(request_of(MODEL, cluster_of(1, 2), 16, fixed), executor=executor)
    with pytest.raises(InvalidInput, match=message) as raised:
        request.layouts  # noqa: B018
    assert [issue.pointer for issue in raised.value.issues] == ["/fixed/recompute_layers"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"nodes": 0}, "/nodes"),
        ({"nodes": 100_000_000, "gpus_per_node": 100_000_000}, "/nodes"),
        ({"reserve": 1e9}, "/reserve"),
        ({"device": "llama-3.1-8b"}, "/device"),
        ({"device": "h1000"}, "/device"),
        ({"device": None}, "/device"),
        ({"memory": 0}, "/memory"),
        ({"memory": None, "device": {"achieved_tflops": 300, "memory_limit": 0}}, "/device/memory_limit"),
        ({"device": {"achieved_tflops": -1}}, "/device/achieved_tflops"),
        ({"links": {"in_node": LINKS["in_node"]}}, "/links/between_nodes"),
        ({"links": None}, "/links"),
        ({"gpus": 8}, "/gpus"),
    ],
)
def test_wrong_clusters_are_refused(change: dict[str, Any], pointer: str) -> None:
    document = {"nodes": 1, "gpus_per_node": 2, "device": {"achieved_tflops": 300}, "links": LINKS}
    with pytest.raises(InvalidInput) as error:
        parse_cluster({**document, "memory": 1e9, **change})
    assert [issue.pointer for issue in error.value.issues] == [pointer]


def test_huge_numbers_are_enumerated_quickly() -> None:
    """By their divisors: counting up to them would take hours."""
    model = {**MODEL, "experts": 99_999_989, "experts_per_token": 1}
    assert len(request_of(model, cluster_of(1, 2), 99_999_989).layouts) < 100


def test_a_microbatch_alone_takes_the_time_of_all_layers() -> None:
    request = request_of(MODEL, cluster_of(1, 4), 1, Fixed(pipeline_parallel=4, tensor_parallel=1))
    (layout,) = request.layouts
    alone = EstimatedLayout.of(layout, request.setting)
    assert alone.memory_bound > 2 * alone.mean_bound
    assert alone.memory_bound <= plan_layout(alone).step_time


def test_the_memory_of_a_cluster_may_be_that_of_its_device() -> None:
    assert parse_cluster({"nodes": 1, "gpus_per_node": 8, "device": "h100"}).size == 80e9
    with pytest.raises(InvalidInput, match="Give the bytes of a device"):
        parse_cluster({"nodes": 1, "gpus_per_node": 2, "device": {"achieved_tflops": 300}, "links": LINKS})


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"model": MODEL}, "/global_batch"),
        ({"model": {**MODEL, "hidden": 0}, "global_batch": 8}, "/model/hidden"),
        ({"model": MODEL, "global_batch": 8, "prediction_layers": -1}, "/prediction_layers"),
        ({"model": 7, "global_batch": 8}, "/model"),
        ({"presets": ["nothing"], "global_batch": 8}, "/presets/0"),
        ({"presets": ["h100"], "global_batch": 8}, "/presets"),
        ({"model": None, "global_batch": 8}, "/model"),
        ({"global_batch": 8}, "/model"),
        ({"model": MODEL, "global_batch": 8, "other": 1}, "/other"),
        ([], ""),
    ],
)
def test_wrong_models_are_refused(document: Any, pointer: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_request(document, cluster_of(1, 2))
    assert [issue.pointer for issue in error.value.issues] == [pointer]


def test_parts_that_contradict_each_other_are_named() -> None:
    request = request_of(MODEL, cluster_of(1, 4), 8, Fixed(tensor_parallel=4, data_parallel=4))
    with pytest.raises(InvalidInput, match="tensor_parallel 4, data_parallel 4"):
        _ = request.layouts


def test_prediction_modules_are_dropped_or_added() -> None:
    document = {"model": {**MODEL, "prediction_layers": 1}, "global_batch": 8}
    for count in (None, 0, 2):
        found = parse_request(document, cluster_of(1, 2), prediction_layers=count).setting.model
        assert found.prediction_layers == (1 if count is None else count)
