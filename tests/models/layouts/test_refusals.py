"""Requests, clusters and profiles that are refused, and layouts and states that executors do not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.executor_layouts import MODEL, PREDICTING, SEEING, Document, cluster_of, request_of
from support.measured_profiles import as_estimated
from zbv_models.layouts.cluster import equal_cluster, parse_cluster
from zbv_models.layouts.executor_rules import executors_of, layouts_of_executors
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.profile import parse_profile
from zbv_models.layouts.request import Request, parse_request
from zbv_solver.errors import InvalidInput


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

LINKS: Document = {
    name: {"latency": 20, "bandwidth": 25} for name in ("in_node", "between_nodes", "between_groups")
}
DEVICE, ONE = {"achieved_tflops": 300}, {"nodes": 1, "gpus_per_node": 8}
BETWEEN = {name: LINKS[name] for name in ("between_nodes", "between_groups")}
IN_NODE = {"in_node": LINKS["in_node"]}
EQUAL = {
    **ONE,
    "device": DEVICE,
    "memory": 1e9,
    "links": {**IN_NODE, "between_nodes": LINKS["between_nodes"]},
}
GROUP = {**EQUAL, "links": IN_NODE}
OF_EQUAL_NODES: list[tuple[Document, str]] = [
    ({"nodes": 0}, "/nodes"),
    ({"nodes": 100_000_000, "gpus_per_node": 100_000_000}, "/nodes"),
    ({"reserve": 1e9}, "/reserve"),
    *(({"device": wrong}, "/device") for wrong in ("llama-3.1-8b", "h1000", None)),
    *(({"memory": wrong}, "/memory") for wrong in (0, None)),
    ({"memory": None, "device": {**DEVICE, "memory_limit": 0}}, "/device/memory_limit"),
    ({"device": {"achieved_tflops": -1}}, "/device/achieved_tflops"),
    ({"links": IN_NODE}, "/links/between_nodes"),
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


def executed(executor: str, model: Document, **fixed: Any) -> None:
    request = request_of(model, cluster_of(1, 4), 8, executor, **fixed)
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
def test_wrong_input_is_refused_with_where_it_is_and_the_rule(
    call: Callable[[], Any], pointers: str, words: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    assert [issue.pointer for issue in error.value.issues] == (pointers.split() or [""])
    detail = error.value.issues[0].detail
    assert [word for word in words.split("…") if word.strip() not in detail] == []


@pytest.mark.parametrize(
    ("parallel", "stages", "fixed", "message"),
    [
        # get_megatron_optimizer: the precision-aware optimizer is only supported with the distributed one.
        ({"precision": "bf16-states"}, {1}, Fixed(zero_stage=0, data_parallel=2), "stage 1 for these"),
        # DistributedOptimizer.__init__: only Adam, and optimizers with an init_state_fn.
        ({"optimizer": "sgd"}, {0}, Fixed(zero_stage=1, data_parallel=2), r"stage 0 .*\(found 1\)"),
        ({"optimizer": "sgd-momentum"}, {0}, Fixed(zero_stage=1, data_parallel=1), "stage 0"),
    ],
)  # fmt: skip
def test_states_may_need_or_forbid_the_distributed_optimizer(
    parallel: Document, stages: set[int], fixed: Fixed, message: str
) -> None:
    request, wrong = (with_states("zbv", parts, **parallel) for parts in (None, fixed))
    found = layouts_of_executors("megatron", request.setting, request.layouts)
    assert {layout.zero_stage for _, layout in found if layout.data_parallel > 1} == stages
    with pytest.raises(InvalidInput, match=f"requires ZeRO {message}"):
        layouts_of_executors("megatron", wrong.setting, wrong.layouts)
