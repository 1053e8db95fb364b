"""Small models and clusters for layouts of executors."""

from __future__ import annotations

from typing import Any

from zbv_models.layouts.cluster import Cluster, MixedCluster, equal_cluster
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import Request, parse_request

Document = dict[str, Any]
MODEL: Document = {
    **{"hidden": 1024, "layers": 6, "heads": 8, "kv_heads": 4, "vocabulary": 32_000, "sequence": 2048},
    **{"positions": "rotary", "norm": "rmsnorm", "gated": True},
}
EXPERTS = {**MODEL, "experts": 8, "experts_per_token": 2}
TIED, PREDICTING = {**MODEL, "tied_embeddings": True}, {**MODEL, "prediction_layers": 1}
SEEING = {**MODEL, "vision": {"hidden": 256, "layers": 4, "heads": 4, "patches": 64}}
LONE: Document = {"tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1, "microbatch_size": 1}
"""Parts of layouts whose ranks are single devices, for one sequence at a time."""


def cluster_of(nodes: int, gpus: int, gigabytes: float = 40.0, speed: float = 1.0, **device: Any) -> Cluster:
    links = {
        "in_node": {"latency": 10, "bandwidth": 300 * speed},
        "between_nodes": {"latency": 20, "bandwidth": 25 * speed},
    }
    rates = {"achieved_tflops": 300, "memory_bandwidth": 1500 * speed, **device}
    memory = {"memory": gigabytes * 1e9, "allocator_share": 1}
    return equal_cluster({"nodes": nodes, "gpus_per_node": gpus, "links": links, "device": rates, **memory})


def request_of(
    model: Document, cluster: Cluster | MixedCluster, batch: int = 8, executor: str = "zbv", *,
    parallel: Document | None = None, **fixed: Any,
) -> Request:  # fmt: skip
    document = {"model": model, "global_batch": batch, "parallel": parallel or {}}
    return parse_request(document, cluster, Fixed(**fixed), executor=executor)


def best_of(request: Request) -> ExecutorLayout:
    (best,) = executor_layouts(request.layouts, request.setting, request.executor).best
    assert isinstance(best, ExecutorLayout)
    return best
