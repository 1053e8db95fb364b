"""Layouts on clusters with several groups of nodes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT
from support.rankings import check_ranking
from zbv_models.layouts.answer import ranking_json, utilisation
from zbv_models.layouts.cluster import MixedCluster, parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.layout import MOST_ARRANGEMENTS, Fixed, Layout, arrangements
from zbv_models.layouts.request import Request, parse_request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.sensitivity import outcomes
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.problem.writing import layered_json
from zbv_solver.search.claims import check_plan

MODEL = {
    **{"hidden": 1024, "layers": 6, "heads": 8, "kv_heads": 4, "vocabulary": 32_000, "sequence": 1024},
    **{"positions": "rotary", "norm": "rmsnorm", "gated": True},
}
FAST = {"achieved_tflops": 300, "memory_bandwidth": 1500}
SLOW = {"achieved_tflops": 120, "memory_bandwidth": 1000}
IN_NODE = {"latency": 10, "bandwidth": 300}
LINKS = {
    "between_nodes": {"latency": 20, "bandwidth": 25},
    "between_groups": {"latency": 50, "bandwidth": 5},
}


def group(device: dict[str, Any], nodes: int, gpus: int, gigabytes: float = 40.0) -> dict[str, Any]:
    document = {"nodes": nodes, "gpus_per_node": gpus, "device": device, "memory": gigabytes * 1e9}
    return {**document, "links": {"in_node": IN_NODE}, "allocator_share": 1}


def request_of(*groups: dict[str, Any], batch: int = 12, fixed: Fixed | None = None, **model: Any) -> Request:
    cluster = parse_cluster({"groups": list(groups), "links": LINKS})
    return parse_request({"model": {**MODEL, **model}, "global_batch": batch}, cluster, fixed)


def test_every_set_of_groups_is_enumerated_with_every_order_of_its_ranks() -> None:
    request = request_of(group(FAST, 2, 2), group(SLOW, 1, 4))
    layouts = request.layouts
    assert len(set(layouts)) == len(layouts)
    for each in layouts:
        of_rank = each.tensor_parallel * each.context_parallel * each.data_parallel
        ranks = Counter(each.groups)
        assert all(count * of_rank == 4 for count in ranks.values())
        assert each.devices == of_rank * each.pipeline_parallel == 4 * len(ranks)
    assert {each.used_groups for each in layouts} == {(0,), (1,), (0, 1)}
    four = {each.groups for each in layouts if each.pipeline_parallel == 4 and each.devices == 8}
    assert four == set(permutations((0, 0, 1, 1)))


def test_the_ranks_of_a_group_are_neighbours_if_there_are_many_orders() -> None:
    assert len(arrangements((0, 1), (3, 3))) == 20 <= MOST_ARRANGEMENTS
    assert arrangements((0, 2), (4, 4)) == ((0, 0, 0, 0, 2, 2, 2, 2), (2, 2, 2, 2, 0, 0, 0, 0))
    assert len(arrangements((0, 1, 2), (2, 4, 1))) == 6


def test_a_problem_has_the_costs_memory_and_links_of_every_rank() -> None:
    request = request_of(group(FAST, 2, 2, 40), group(SLOW, 1, 2, 20), group(FAST, 1, 2, 30))
    layout = Layout(1, 1, 1, 2, 4, 1, 6, 1, "per-stage", "tp-cp-dp-pp", (1, 0, 0, 2))
    assert layout in request.layouts
    estimated = EstimatedLayout.of(layout, request.setting)
    problem = estimated.problem
    assert problem.limit == (20e9, 40e9, 40e9, 30e9)
    assert problem.devices == ("group-1", "group-0", "group-0", "group-2")
    assert [link.bandwidth for link in problem.links] == [5e3, 25e3, 5e3, 5e3]
    assert [link.latency for link in problem.links] == [50, 20, 50, 50]
    block = problem.model.layers[1]
    fast, slow, same = (block.costs_when(False, f"group-{number}") for number in range(3))
    assert slow.forward > 2 * fast.forward > 0
    assert same == fast
    assert slow.memory == fast.memory
    assert parse_any_problem(layered_json(problem)) == problem
    assert isinstance(problem, LayeredProblem)


def test_groups_of_equal_nodes_cost_the_same_as_one_cluster() -> None:
    """Two groups with the link between nodes between them are one cluster of equal nodes."""
    same = {"groups": [group(FAST, 1, 2)] * 2, "links": {"between_nodes": LINKS["between_nodes"]}}
    both = {**group(FAST, 2, 2), "links": {"in_node": IN_NODE, "between_nodes": LINKS["between_nodes"]}}
    document = {"model": MODEL, "global_batch": 12}
    fixed = Fixed(pipeline_parallel=2, microbatch_size=1)
    rankings = []
    for cluster in (same, both):
        request = parse_request(document, parse_cluster(cluster), fixed)
        rankings.append(best_layouts(request.layouts, request.setting))
    grouped, one = rankings
    assert grouped.best[0].layout.used_groups == (0, 1)
    assert grouped.best[0].step_time == pytest.approx(one.best[0].step_time, rel=1e-9)
    assert grouped.no_layout_below == pytest.approx(one.no_layout_below, rel=1e-9)


CASES = st.tuples(
    st.sampled_from([((1, 1), (1, 1)), ((1, 2), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (1, 1), (1, 1))]),
    st.floats(2.0, 40.0),
    st.floats(2.0, 40.0),
    st.integers(2, 6),
    st.booleans(),
)


@settings(max_examples=3)
@given(CASES)
def test_the_best_layout_is_that_of_planning_every_one_in_every_order(
    case: tuple[tuple[tuple[int, int], ...], float, float, int, bool],
) -> None:
    sizes, memory, other, layers, is_tied = case
    groups = [
        group(SLOW if number % 2 else FAST, *size, other if number % 2 else memory)
        for number, size in enumerate(sizes)
    ]
    fixed = Fixed(zero_stage=1, microbatch_size=2)
    request = request_of(*groups, batch=12, fixed=fixed, layers=layers, tied_embeddings=is_tied)
    check_ranking(request)


def test_a_slow_group_gets_fewer_layers_or_none() -> None:
    fixed = Fixed(pipeline_parallel=2, data_parallel=1, microbatch_size=1, recompute="none")
    request = request_of(group(FAST, 1, 1), group(SLOW, 1, 1), batch=32, layers=12, fixed=fixed)
    ranking = best_layouts(request.layouts, request.setting)
    (row,) = ranking_json(ranking, request)["layouts"]
    assert sorted(row["groups"]) == [0, 1]
    assert row["devices"] == 2
    assert sum(row["composition"].values()) == pytest.approx(row["step_time"], rel=1e-9)
    steps = {(each.of, each.factor): each.step_time for each in outcomes(ranking, request)}
    slower, faster = steps["device_flops", 0.8], steps["device_flops", 1.2]
    assert slower is not None
    assert faster is not None
    assert slower > row["step_time"] > faster
    assert steps["between_nodes_bandwidth", 0.5] is not None
    problem = ranking.best[0].plan.problem
    counts = [sum(len(row["partition"][s]) for s in stages) for stages in problem.placement.stages_of]
    assert counts[row["groups"].index(0)] > 1.5 * counts[row["groups"].index(1)]
    assert 0 < utilisation(ranking.best[0], request) < 1
    layered = ranking.best[0].estimated.problem
    assert check_plan(row["plan"], layered).problem == problem
    crawling = {**SLOW, "achieved_tflops": 1, "memory_bandwidth": 5}
    request = request_of(group(FAST, 1, 1), group(crawling, 1, 1))
    (row,) = ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
    assert (row["groups"], row["devices"]) == ([0], 1)


@pytest.mark.parametrize(
    ("document", "pointers"),
    [
        ({"groups": []}, ["/groups"]),
        ({"groups": [{"nodes": 1, "gpus_per_node": 8}]}, ["/groups/0/device"]),
        ({"groups": [{"nodes": 1, "gpus_per_node": 8, "device": "h100"}], "nodes": 1}, ["/nodes"]),
        ({"groups": [{"nodes": 1, "gpus_per_node": 8, "device": "h1000"}]}, ["/groups/0/device"]),
        (
            {"groups": [{"nodes": 1, "gpus_per_node": 8, "device": {"achieved_tflops": 0}}]},
            ["/groups/0/device/achieved_tflops"],
        ),
        (
            {"groups": [{"nodes": 1, "gpus_per_node": 8, "device": {"achieved_tflops": 100}}] * 2},
            ["/groups/0/memory", "/links", "/groups/1/memory", "/links"],
        ),
        (
            {
                "groups": [{"nodes": 1, "gpus_per_node": 8, "device": FAST, "memory": 1e9}],
                "links": {"between_nodes": {"latency": 1, "bandwidth": 9}},
            },
            ["/groups/0/links"],
        ),
        ({"groups": [group(FAST, 1, 1)] * 5}, ["/groups"]),
    ],
)
def test_wrong_groups_are_refused(document: dict[str, Any], pointers: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_cluster(document)
    assert [issue.pointer for issue in error.value.issues] == pointers


def test_the_example_takes_its_links_from_its_devices() -> None:
    cluster = parse_cluster(json.loads((ROOT / "examples" / "cluster-mixed.json").read_text()))
    assert isinstance(cluster, MixedCluster)
    assert cluster.devices == 128
    fast, slow = cluster.groups
    assert fast.peak_tflops > slow.peak_tflops
    assert cluster.between_groups.bandwidth == min(
        fast.between_nodes.bandwidth or 0.0, slow.between_nodes.bandwidth or 0.0
    )
