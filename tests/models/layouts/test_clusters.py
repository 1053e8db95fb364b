"""Clusters: the links that groups of devices cross, several groups of nodes, and wrong documents."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layouts import MODEL, cluster_of
from support.rankings import check_ranking
from zbv_models.layouts.answer import ranking_json, utilisation
from zbv_models.layouts.cluster import ALLOCATOR_SHARE, equal_cluster, parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.layout import MOST_ARRANGEMENTS, Fixed, Layout, Order, arrangements
from zbv_models.layouts.request import Request, parse_request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.sensitivity import outcomes
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.problem.writing import layered_json
from zbv_solver.search.claims import check_plan

# --- links of equal nodes

SLOW_INSIDE = replace(cluster_of(2, 4), in_node=replace(cluster_of(2, 4).in_node, bandwidth=60.0))


@pytest.mark.parametrize(("cluster", "degrees", "placement", "bandwidths"), [
    # (tensor, context, expert, data) of 4 cards per node with 25 GB/s each, and 300 GB/s inside nodes.
    (cluster_of(2, 4), (1, 1, 1, 8), "tp-cp-dp-pp", (300, 100, 100)),
    (cluster_of(2, 4), (2, 1, 1, 4), "tp-cp-dp-pp", (300, 50, 100)),
    (cluster_of(2, 4), (2, 2, 2, 2), "tp-cp-dp-pp", (300, 50, 50)),
    (cluster_of(2, 4), (4, 1, 4, 2), "tp-cp-dp-pp", (300, 25, 25)),
    (cluster_of(2, 4), (8, 1, 1, 1), "tp-cp-dp-pp", (100, 300, 100)),
    (cluster_of(2, 4), (1, 1, 2, 8), "tp-cp-dp-pp", (300, 100, 50)),
    (cluster_of(2, 4), (1, 1, 8, 8), "tp-cp-dp-pp", (300, 100, 300)),
    (cluster_of(4, 4), (1, 1, 1, 8), "tp-cp-pp-dp", (300, 50, 50)),
    (cluster_of(3, 4), (1, 3, 1, 4), "tp-cp-dp-pp", (300, 100, 100)),
    (cluster_of(3, 4), (6, 1, 1, 2), "tp-cp-dp-pp", (50, 25, 100)),
    # A ring is not faster than the link inside its nodes.
    (SLOW_INSIDE, (1, 1, 1, 8), "tp-cp-dp-pp", (60, 60, 60)),
    # Five devices, two on each node or less.
    (cluster_of(2, 10), (1, 1, 4, 20), "tp-cp-dp-pp", (300, 250, 25)),
])  # fmt: skip
def test_links_of_rings(
    cluster: Any, degrees: tuple[int, int, int, int], placement: Order, bandwidths: tuple[float, float, float]
) -> None:
    tensor, context, _, data = degrees
    layout = Layout(*degrees, cluster.devices // (tensor * context * data), 1, 8, 1, "per-stage", placement)
    links = layout.links(cluster)
    assert (links.tensor.bandwidth, links.data.bandwidth, links.expert_data.bandwidth) == bandwidths


@pytest.mark.parametrize(
    ("placement", "pipeline", "data", "near"), [("tp-cp-dp-pp", 25, 300, 4), ("tp-cp-pp-dp", 300, 25, 2)]
)
def test_neighbours_share_nodes(placement: Order, pipeline: float, data: float, near: int) -> None:
    layout = Layout(2, 1, 1, 2, 2, 1, 8, 1, "per-stage", placement)
    links = layout.links(cluster_of(2, 4))
    assert (links.tensor.bandwidth, links.data.bandwidth, links.pipeline.bandwidth) == (300, data, pipeline)
    experts = replace(layout, expert_parallel=8, data_parallel=4)
    assert experts.degrees(cluster_of(4, 4)).expert_in_node == near


def test_rings_on_a_node_have_the_latency_of_a_step_unless_the_link_is_given() -> None:
    layout = Layout(4, 1, 1, 2, 2, 1, 8, 1, "per-stage", "tp-cp-dp-pp")
    document = {"nodes": 2, "gpus_per_node": 8, "device": "h100"}
    slow = {"latency": 1.0, "bandwidth": 100.0}
    given = {**document, "links": {"in_node": slow, "between_nodes": slow}}
    assert layout.links(equal_cluster(document)).tensor.step_latency == 3.4
    assert layout.links(equal_cluster(given)).tensor.step_latency == 0
    across = replace(layout, tensor_parallel=16, data_parallel=1, pipeline_parallel=1)
    # One of 15 steps leaves a node.
    assert across.links(equal_cluster(document)).tensor.step_latency == pytest.approx((14 * 3.4 + 20) / 15)


def test_memory_is_compared_with_what_the_allocator_leaves_to_tensors() -> None:
    document = {"nodes": 1, "gpus_per_node": 4, "device": "h100", "reserve": 1e9, "memory": 11e9}
    cluster = equal_cluster(document)
    assert cluster.size == 11e9
    assert cluster.memory == pytest.approx(1e9 + 10e9 / ALLOCATOR_SHARE)
    assert cluster.reserved(cluster.memory) == pytest.approx(11e9)
    assert equal_cluster({**document, "allocator_share": 1}).memory == 11e9
    request = parse_request({"model": MODEL, "global_batch": 8}, cluster, Fixed(pipeline_parallel=2))
    problem = EstimatedLayout.of(request.layouts[0], request.setting).problem
    assert (problem.static, problem.limit) == ((1e9,) * 2, (cluster.memory,) * 2)
    (row,) = ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
    assert row["reserved_memory"] == pytest.approx(1e9 + ALLOCATOR_SHARE * (row["peak_memory"] - 1e9))
    assert row["reserved_memory"] <= 11e9
    assert equal_cluster({"nodes": 1, "gpus_per_node": 8, "device": "h100"}).size == 80e9


# --- several groups of nodes

FAST = {"achieved_tflops": 300, "memory_bandwidth": 1500}
SLOW = {"achieved_tflops": 120, "memory_bandwidth": 1000}
LINKS: dict[str, Any] = {
    "between_nodes": {"latency": 20, "bandwidth": 25},
    "between_groups": {"latency": 50, "bandwidth": 5},
}


def group(device: dict[str, Any], nodes: int, gpus: int, gigabytes: float = 40.0) -> dict[str, Any]:
    document = {"nodes": nodes, "gpus_per_node": gpus, "device": device, "memory": gigabytes * 1e9}
    return {**document, "links": {"in_node": {"latency": 10, "bandwidth": 300}}, "allocator_share": 1}


def request_of(*groups: dict[str, Any], batch: int = 12, fixed: Fixed | None = None, **model: Any) -> Request:
    """Of several groups, or of the equal nodes of one."""
    links = {"in_node": groups[0]["links"]["in_node"], "between_nodes": LINKS["between_nodes"]}
    cluster = {"groups": list(groups), "links": LINKS} if groups[1:] else groups[0] | {"links": links}
    return parse_request({"model": {**MODEL, **model}, "global_batch": batch}, parse_cluster(cluster), fixed)


def test_every_set_of_groups_is_enumerated_with_every_order_of_its_ranks() -> None:
    layouts = request_of(group(FAST, 2, 2), group(SLOW, 1, 4)).layouts
    assert len(set(layouts)) == len(layouts)
    for each in layouts:
        of_rank = each.tensor_parallel * each.context_parallel * each.data_parallel
        ranks = Counter(each.groups)
        assert all(count * of_rank == 4 for count in ranks.values())
        assert each.devices == of_rank * each.pipeline_parallel == 4 * len(ranks)
    assert {each.used_groups for each in layouts} == {(0,), (1,), (0, 1)}
    four = {each.groups for each in layouts if each.pipeline_parallel == 4 and each.devices == 8}
    assert four == set(permutations((0, 0, 1, 1)))
    # The ranks of a group are neighbours if there are many orders.
    assert len(arrangements((0, 1), (3, 3))) == 20 <= MOST_ARRANGEMENTS
    assert arrangements((0, 2), (4, 4)) == ((0, 0, 0, 0, 2, 2, 2, 2), (2, 2, 2, 2, 0, 0, 0, 0))


def test_a_problem_has_the_costs_memory_and_links_of_every_rank() -> None:
    request = request_of(group(FAST, 2, 2, 40), group(SLOW, 1, 2, 20), group(FAST, 1, 2, 30))
    layout = Layout(1, 1, 1, 2, 4, 1, 6, 1, "per-stage", "tp-cp-dp-pp", (1, 0, 0, 2))
    assert layout in request.layouts
    problem = EstimatedLayout.of(layout, request.setting).problem
    assert problem.limit == (20e9, 40e9, 40e9, 30e9)
    assert problem.devices == ("group-1", "group-0", "group-0", "group-2")
    other = (50, 5e3)
    assert [(link.latency, link.bandwidth) for link in problem.links] == [other, (20, 25e3), other, other]
    block = problem.model.layers[1]
    fast, slow, same = (block.costs_when(False, f"group-{number}") for number in range(3))
    assert slow.forward > 2 * fast.forward > 0
    assert (same, slow.memory) == (fast, fast.memory)
    assert parse_any_problem(layered_json(problem)) == problem


def test_groups_of_equal_nodes_cost_the_same_as_one_cluster() -> None:
    """Two groups with the link between nodes between them are one cluster of equal nodes."""
    fixed, links = Fixed(pipeline_parallel=2, microbatch_size=1), {"between_nodes": LINKS["between_nodes"]}
    groups = parse_cluster({"groups": [group(FAST, 1, 2)] * 2, "links": links})
    requests = [request_of(group(FAST, 2, 2), fixed=fixed)]
    requests += [parse_request({"model": MODEL, "global_batch": 12}, groups, fixed)]
    one, grouped = (best_layouts(request.layouts, request.setting) for request in requests)
    assert grouped.best[0].layout.used_groups == (0, 1)
    assert grouped.best[0].step_time == pytest.approx(one.best[0].step_time, rel=1e-9)
    assert grouped.no_layout_below == pytest.approx(one.no_layout_below, rel=1e-9)


SIZES = [
    *(((1, 2),), ((2, 2),), ((3, 1),)),
    *(((1, 1), (1, 1)), ((1, 2), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (1, 1), (1, 1))),
]
"""Nodes, and devices of a node, of every group."""
MEMORY = st.floats(2.0, 50.0)


@settings(max_examples=7)
@given(st.sampled_from(SIZES), st.tuples(MEMORY, MEMORY), st.integers(2, 6), st.booleans(), st.booleans())
def test_the_best_of_all_layouts_is_found(
    sizes: tuple[tuple[int, int], ...], memory: tuple[float, float], layers: int, is_tied: bool, is_moe: bool
) -> None:
    kinds = [(FAST, memory[0]), (SLOW, memory[1]), (FAST, memory[0])]
    groups = [group(device, *size, room) for (device, room), size in zip(kinds, sizes, strict=False)]
    experts = {"experts": 8, "experts_per_token": 2} if is_moe and len(groups) == 1 else {}
    model: dict[str, Any] = {"layers": layers, "tied_embeddings": is_tied, "sequence": 1024, **experts}
    check_ranking(request_of(*groups, fixed=Fixed(zero_stage=1, microbatch_size=2), **model))


def test_a_slow_group_gets_fewer_layers_or_none() -> None:
    fixed = Fixed(pipeline_parallel=2, data_parallel=1, microbatch_size=1, recompute="none")
    request = request_of(group(FAST, 1, 1), group(SLOW, 1, 1), batch=32, layers=12, fixed=fixed)
    ranking = best_layouts(request.layouts, request.setting)
    (row,), (best,) = ranking_json(ranking, request)["layouts"], ranking.best
    assert (sorted(row["groups"]), row["devices"]) == ([0, 1], 2)
    assert sum(row["composition"].values()) == pytest.approx(row["step_time"], rel=1e-9)
    steps = {(each.of, each.factor): each.step_time or 0.0 for each in outcomes(ranking, request)}
    assert steps["device_flops", 0.8] > row["step_time"] > steps["device_flops", 1.2] > 0
    assert steps["between_nodes_bandwidth", 0.5] > 0
    problem = best.plan.problem
    counts = [sum(len(row["partition"][s]) for s in stages) for stages in problem.placement.stages_of]
    assert counts[row["groups"].index(0)] > 1.5 * counts[row["groups"].index(1)]
    assert 0 < utilisation(best, request) < 1
    assert check_plan(row["plan"], best.estimated.problem).problem == problem
    request = request_of(group(FAST, 1, 1), group({"achieved_tflops": 1, "memory_bandwidth": 5}, 1, 1))
    (row,) = ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
    assert (row["groups"], row["devices"]) == ([0], 1)
