"""Requests: links of their clusters, several groups of nodes, and every input that is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layouts import MODEL, PREDICTING, SEEING, Document, cluster_of
from support.executor_layouts import request_of as small_request
from support.measured_profiles import as_estimated
from support.rankings import check_ranking
from zbv_models.layouts.answer import ranking_json, utilisation
from zbv_models.layouts.cluster import ALLOCATOR_SHARE, doubts, equal_cluster, parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.executor_rules import executors_of, layouts_of_executors
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.layout import MOST_ARRANGEMENTS, Fixed, Layout, Order, arrangements
from zbv_models.layouts.profile import parse_profile
from zbv_models.layouts.request import Request, parse_request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.sensitivity import outcomes
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.problem.writing import layered_json
from zbv_solver.search.claims import check_plan

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
def test_rings(cluster: Any, degrees: tuple[int, int, int, int], placement: Order, bandwidths: Any) -> None:
    tensor, context, _, data = degrees
    layout = Layout(*degrees, cluster.devices // (tensor * context * data), 1, 8, 1, "per-stage", placement)
    links = layout.links(cluster)
    assert (links.tensor.bandwidth, links.data.bandwidth, links.expert_data.bandwidth) == bandwidths


def test_neighbours_share_nodes() -> None:
    numbers: dict[Order, tuple[float, ...]] = {"tp-cp-dp-pp": (300, 25, 4), "tp-cp-pp-dp": (25, 300, 2)}
    for placement, expected in numbers.items():
        layout = Layout(2, 1, 1, 2, 2, 1, 8, 1, "per-stage", placement)
        links = layout.links(cluster_of(2, 4))
        experts = replace(layout, expert_parallel=8, data_parallel=4).degrees(cluster_of(4, 4))
        assert (links.data.bandwidth, links.pipeline.bandwidth, experts.expert_in_node) == expected


def test_rings_on_a_node_have_the_latency_of_a_step_unless_the_link_is_given() -> None:
    layout = Layout(4, 1, 1, 2, 2, 1, 8, 1, "per-stage", "tp-cp-dp-pp")
    document = {"nodes": 2, "gpus_per_node": 8, "device": "h100"}
    given = {**document, "links": {"in_node": BETWEEN_NODES, "between_nodes": BETWEEN_NODES}}
    assert layout.links(equal_cluster(document)).tensor.step_latency == 3.4
    assert layout.links(equal_cluster(given)).tensor.step_latency == 0
    across = replace(layout, tensor_parallel=16, data_parallel=1, pipeline_parallel=1)  # one step leaves
    assert across.links(equal_cluster(document)).tensor.step_latency == pytest.approx((14 * 3.4 + 20) / 15)


def test_memory_is_compared_with_what_the_allocator_leaves_to_tensors() -> None:
    document = {"nodes": 1, "gpus_per_node": 4, "device": "h100", "reserve": 1e9, "memory": 11e9}
    cluster = equal_cluster(document)
    assert cluster.size == 11e9
    assert cluster.memory == pytest.approx(1e9 + 10e9 / ALLOCATOR_SHARE)
    assert cluster.reserved(cluster.memory) == pytest.approx(11e9)
    assert equal_cluster({**document, "allocator_share": 1}).memory == 11e9
    request = parse_request({"model": MODEL, "global_batch": 8}, cluster, Fixed(1, 1, pipeline_parallel=2))
    problem = EstimatedLayout.of(request.layouts[0], request.setting).problem
    assert (problem.static, problem.limit) == ((1e9,) * 2, (cluster.memory,) * 2)
    (row,) = ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
    assert row["reserved_memory"] == pytest.approx(1e9 + ALLOCATOR_SHARE * (row["peak_memory"] - 1e9))
    assert equal_cluster({"nodes": 1, "gpus_per_node": 8, "device": "h100"}).size == 80e9


FAST = {"achieved_tflops": 300, "memory_bandwidth": 1500}
SLOW = {"achieved_tflops": 120, "memory_bandwidth": 1000}
BETWEEN_NODES = {"latency": 20, "bandwidth": 25}
LINKS = {"between_nodes": BETWEEN_NODES, "between_groups": {"latency": 50, "bandwidth": 5}}


def group(device: Document, nodes: int, gpus: int, gigabytes: float = 40.0) -> Document:
    document = {"nodes": nodes, "gpus_per_node": gpus, "device": device, "memory": gigabytes * 1e9}
    return {**document, "links": {"in_node": {"latency": 10, "bandwidth": 300}}, "allocator_share": 1}


def request_of(*groups: Document, batch: int = 12, fixed: Fixed | None = None, **model: Any) -> Request:
    """Of several groups, or of the equal nodes of one."""
    links = {"in_node": groups[0]["links"]["in_node"], "between_nodes": BETWEEN_NODES}
    cluster = {"groups": list(groups), "links": LINKS} if groups[1:] else groups[0] | {"links": links}
    return parse_request({"model": {**MODEL, **model}, "global_batch": batch}, parse_cluster(cluster), fixed)


def test_every_set_of_groups_is_enumerated_with_every_order_of_its_ranks() -> None:
    layouts = request_of(group(FAST, 2, 2), group(SLOW, 1, 4)).layouts
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
    unlinked = parse_cluster({"groups": [{**ONE, "device": name} for name in ("h100", "a100")]})
    links = unlinked.between_groups, *(each.between_nodes for each in unlinked.groups)
    rates = [link.bandwidth or 0 for link in links]
    assert rates[0] == min(rates) < max(rates)


def test_groups_of_equal_nodes_cost_the_same_as_one_cluster() -> None:
    """Two groups with the link between nodes between them are one cluster of equal nodes."""
    links = {"between_nodes": BETWEEN_NODES}
    halves = parse_cluster({"groups": [group(FAST, 1, 2)] * 2, "links": links})
    request = request_of(group(FAST, 2, 2), fixed=Fixed(pipeline_parallel=2, microbatch_size=1))
    one, grouped = (best_layouts(a.layouts, a.setting) for a in (request, replace(request, cluster=halves)))
    assert grouped.best[0].layout.used_groups == (0, 1)
    assert grouped.best[0].step_time == pytest.approx(one.best[0].step_time, rel=1e-9)
    assert grouped.no_layout_below == pytest.approx(one.no_layout_below, rel=1e-9)


LONE, PAIR = (1, 1), (1, 2)
SIZES = [(PAIR,), ((2, 2),), ((3, 1),), (LONE, LONE), (PAIR, PAIR), (PAIR, LONE), (LONE, LONE, LONE)]
"""Nodes, and devices of a node, of every group."""
MEMORY = st.floats(2.0, 50.0)


@settings(max_examples=4)
@given(st.sampled_from(SIZES), st.tuples(MEMORY, MEMORY), st.integers(2, 6), st.booleans(), st.booleans())
def test_the_best_of_all_layouts_is_found(
    sizes: tuple[tuple[int, int], ...], memory: tuple[float, float], layers: int, is_tied: bool, is_moe: bool
) -> None:
    kinds = [(FAST, memory[0]), (SLOW, memory[1]), (FAST, memory[0])]
    groups = [group(device, *size, room) for (device, room), size in zip(kinds, sizes, strict=False)]
    experts = {"experts": 8, "experts_per_token": 2} if is_moe and len(groups) == 1 else {}
    model: Document = {"layers": layers, "tied_embeddings": is_tied, "sequence": 1024, **experts}
    check_ranking(request_of(*groups, fixed=Fixed(zero_stage=1, microbatch_size=2), **model))


def test_a_slow_group_gets_fewer_layers_or_none() -> None:
    fixed = Fixed(pipeline_parallel=2, data_parallel=1, microbatch_size=1, recompute="none")
    request = request_of(group(FAST, 1, 1), group(SLOW, 1, 1), batch=8, layers=8, fixed=fixed)
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


# --- wrong documents, and what executors do not run


def requested(document: Document, executor: str = "zbv", **fixed: Any) -> None:
    given = {"model": MODEL, "global_batch": 8, **document}
    parse_request(given, cluster_of(1, 4), Fixed(**fixed), executor=executor).layouts  # noqa: B018


MLP, MOE_ACT = ({"parallel": {"recompute_modules": [name]}} for name in ("mlp", "moe_act"))
SELECTIVE = {"recompute": "selective"}
REQUESTS: list[tuple[Callable[[], Any], str, str]] = [
    (partial(parse_request, [], cluster_of(1, 2)), "", "must be a JSON object"),
    (partial(requested, {"global_batch": None}), "/global_batch", ""),
    (partial(requested, {"model": {**MODEL, "hidden": 0}}), "/model/hidden", ""),
    (partial(requested, {"prediction_layers": -1}), "/prediction_layers", ""),
    *((partial(requested, {"model": wrong}), "/model", "") for wrong in (7, None)),
    (partial(requested, {"model": {}}), "/model", "this section is absent"),
    (partial(requested, {"model": {}, "presets": ["nothing"]}), "/presets/0", ""),
    (partial(requested, {"model": {}, "presets": ["h100"]}), "/presets", "a preset of a device"),
    (partial(requested, {"other": 1}), "/other", ""),
    (partial(requested, {"parallel": 3}), "/parallel", ""),
    (partial(requested, {}, tensor_parallel=4, data_parallel=4), "/fixed", "el 4, data_parallel 4"),
    (partial(requested, {}, recompute_layers=2), "/fixed/recompute_layers", "zbv, which recomputes whole"),
    (partial(requested, {}, "megatron", recompute_layers=2, recompute="none"),
     "/fixed/recompute_layers", "2 recomputed layers and recompute none"),
    (partial(requested, MOE_ACT, **SELECTIVE),
     "/parallel/recompute_modules", "found moe_act; no layer of this model has them"),
    (partial(requested, MLP, "torchtitan", **SELECTIVE),
     "/parallel/recompute_modules", "found mlp; torchtitan has op alone"),
]  # fmt: skip

DEVICE, ONE = {"achieved_tflops": 300}, {"nodes": 1, "gpus_per_node": 8}
LINK = {"latency": 20, "bandwidth": 25}
IN_NODE, BETWEEN = {"in_node": LINK}, {"between_nodes": LINK, "between_groups": LINK}
GROUP = {**ONE, "device": DEVICE, "memory": 1e9, "links": IN_NODE}
EQUAL = {**GROUP, "links": {**IN_NODE, "between_nodes": LINK}}
OF_EQUAL_NODES: list[tuple[Document, str]] = [
    ({"nodes": 0}, "/nodes"),
    ({"nodes": 100_000_000, "gpus_per_node": 100_000_000}, "/nodes"),
    ({"reserve": 1e9}, "/reserve"),
    *(({"device": wrong}, "/device") for wrong in ("llama-3.1-8b", "h1000", None)),
    *(({"memory": wrong}, "/memory") for wrong in (0, None, 80, "80GB")),
    ({"memory": None, "device": {**DEVICE, "memory_limit": 0}}, "/device/memory_limit"),
    ({"device": {"achieved_tflops": -1}}, "/device/achieved_tflops"),
    ({"links": IN_NODE}, "/links"),
    ({"links": {"in_node": {"latency": 5, "bandwidth": 450e9}}}, "/links/in_node/bandwidth"),
    ({"links": None}, "/links"),
    ({"gpus": 8}, "/gpus"),
]
OF_GROUPS: list[tuple[Document, str]] = [
    *(({"groups": [GROUP] * count}, "/groups") for count in (0, 5)),
    ({"groups": [ONE]}, "/groups/0/device"),
    ({"groups": [{**ONE, "device": "h100"}], "nodes": 1}, "/nodes"),
    ({"groups": [{**ONE, "device": "h1000"}]}, "/groups/0/device"),
    ({"groups": [{**ONE, "device": {"achieved_tflops": 0}}]}, "/groups/0/device/achieved_tflops"),
    ({"groups": [{**ONE, "device": DEVICE}] * 2}, "/groups/0/memory /links /groups/1/memory /links"),
    ({"groups": [{**ONE, "device": DEVICE, "memory": 1e9}], "links": BETWEEN}, "/groups/0/links"),
]
CLUSTERS = [
    *((partial(parse_cluster, {**EQUAL, **change}), pointer, "") for change, pointer in OF_EQUAL_NODES),
    *((partial(parse_cluster, document), pointers, "") for document, pointers in OF_GROUPS),
]

PROFILE = as_estimated()
WRONG_PROFILES: list[tuple[Any, str, str]] = [
    (PROFILE | {"units": {"time": "ms", "memory": "bytes"}}, "/units/time", ""),
    (PROFILE | {"units": {"time": "us"}}, "/units/memory", ""),
    (PROFILE | {"profile": None}, "/profile", ""),
    (PROFILE | {"profile": PROFILE["profile"] | {"microbatch_size": 0}}, "/profile/microbatch_size", ""),
    (PROFILE | {"profile": PROFILE["profile"] | {"ranks": 2}}, "/profile/ranks", ""),
    (PROFILE | {"layers": []}, "/layers", ""),
    (PROFILE | {"layers": None}, "/layers", ""),
    ([], "", "JSON object"),
    ({"layouts": []}, "", "this is no profile"),
    ({"pp_degree": 2}, "/layers", "whole stages"),
]
PROFILES = [(partial(parse_profile, document), *expected) for document, *expected in WRONG_PROFILES]


def test_values_in_another_unit_are_questioned() -> None:
    """Gb/s for GB/s, seconds for µs, and gigabytes for bytes differ from the named device by a factor."""
    wrong, right = {"latency": 10e-6, "bandwidth": 3000}, {"latency": 10, "bandwidth": 100}
    for values, expected in ((wrong, ["latency", "bandwidth"]), (right, [])):
        for links in ({"in_node": values}, {"between_nodes": values}):
            keys = [f"/links/{name}/{key}" for name in links for key in expected]
            common, inside = ({}, links) if "in_node" in links else (links, {})
            equal = {**ONE, "device": "h100", "links": links, "memory": 64e9}
            groups = {"groups": [{**ONE, "device": "h100", "links": inside}], "links": common}
            for document in (equal, groups):
                parse_cluster(document)
                assert [each.split(":")[0].replace("/groups/0", "") for each in doubts(document)] == keys
    h100 = {**ONE, "device": "h100"}
    assert doubts({**h100, "memory": 80e6})[0].startswith("/memory: found 80\u202f000\u202f000 bytes")
    assert doubts({**h100, "reserve": 6, "host_memory": 512}) == [
        "/reserve: found 6 bytes. Check the unit.",
        "/host_memory: found 512 bytes. Check the unit.",
    ]
    assert doubts({**h100, "reserve": 0, "host_memory": None}) == []


def executed(executor: str, model: Document, **fixed: Any) -> None:
    request = small_request(model, cluster_of(1, 4), 8, executor, **fixed)
    executor_layouts(request.layouts, request.setting, executor)


GATED = {**MODEL, "output_gate": True}
RULES: list[tuple[Callable[[], Any], str, str]] = [
    (partial(executed, "megatron", SEEING), "", "Megatron-LM requires a model without a vision encoder"),
    (partial(executed, "deepspeed", MODEL), "", "found executor 'deepspeed'; must be one of zbv, megatron"),
    (partial(executed, "torchtitan", PREDICTING, pipeline_parallel=2, recompute="none"), "",
     "neither a pipeline … (--prediction-layers 0 leaves it out)"),
    (partial(executed, "torchtitan", GATED, **SELECTIVE), "", "without selective recomputation blocks that"),
    # Some layouts break further rules, but these are enough to refuse all.
    (partial(executed, "megatron", MODEL, zero_stage=3, data_parallel=4), "",
     "Megatron-LM can run none of the … It requires ZeRO stage 0, or 1 … . All layouts have zero stage 3. "),
    (partial(executed, "torch", MODEL, **SELECTIVE), "",
     "It requires all layers recomputed in full, or none … . All layouts have recompute selective. "),
    (partial(executed, "torchtitan", MODEL, recompute_layers=2), "",
     "It requires all layers recomputed alike, and … . All layouts have recompute layers 2. "),
]  # fmt: skip


def with_states(executor: str, fixed: Fixed | None = None, **parallel: Any) -> Request:
    model = {"product_dtype": "fp8"} if "float8" in parallel.get("precision", "") else {}
    document = {"presets": ["llama-3.1-8b"], "global_batch": 8, "parallel": parallel, "model": model}
    cluster = equal_cluster({"nodes": 1, "gpus_per_node": 8, "device": "h100"})
    return parse_request(document, cluster, fixed, executor=executor)


def states(executor: str, **parallel: Any) -> None:
    setting = with_states(executor, **parallel).setting
    assert executor not in executors_of("any", setting)
    executors_of(executor, setting)


STATES: list[tuple[Callable[[], Any], str, str]] = [
    (partial(states, "torchtitan", optimizer="muon"), "", "torchtitan requires adam (found muon)"),
    (partial(states, "torchtitan", precision="mixed"), "", "parameters of 2 bytes and gradients of 4"),
    *((partial(states, name, offloaded_states=0.5), "", "requires no offloaded states")
      for name in ("torchtitan", "torch")),
    (partial(states, "megatron", precision="half"), "", "because its optimizers update a master copy"),
    (partial(states, "megatron", precision="bf16-states", optimizer="lion"), "", "adam and bfloat16"),
    (partial(states, "megatron", precision="float8-gather"), "", "requires parameters that are gathered as"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "pointers", "words"), [*REQUESTS, *CLUSTERS, *PROFILES, *RULES, *STATES])
def test_refusals(call: Callable[[], Any], pointers: str, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    assert [issue.pointer for issue in error.value.issues] == (pointers.split() or [""])
    detail = error.value.issues[0].detail
    assert [word for word in words.split("…") if word.strip() not in detail] == []


@pytest.mark.parametrize(("parallel", "stages", "fixed", "message"), [
    # get_megatron_optimizer: the precision-aware optimizer is only supported with the distributed one.
    ({"precision": "bf16-states"}, {1}, Fixed(zero_stage=0, data_parallel=2), "stage 1 for these"),
    # DistributedOptimizer.__init__: only Adam, and optimizers with an init_state_fn.
    ({"optimizer": "sgd"}, {0}, Fixed(zero_stage=1, data_parallel=2), r"stage 0 .*\(found 1\)"),
    ({"optimizer": "sgd-momentum"}, {0}, Fixed(zero_stage=1, data_parallel=1), "stage 0"),
])  # fmt: skip
def test_distributed_optimizers(parallel: Document, stages: set[int], fixed: Fixed, message: str) -> None:
    request, wrong = (with_states("zbv", parts, **parallel) for parts in (None, fixed))
    found = layouts_of_executors("megatron", request.setting, request.layouts)
    assert {layout.zero_stage for _, layout in found if layout.data_parallel > 1} == stages
    with pytest.raises(InvalidInput, match=f"requires ZeRO {message}"):
        layouts_of_executors("megatron", wrong.setting, wrong.layouts)
