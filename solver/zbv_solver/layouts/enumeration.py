"""All layouts of a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from zbv_solver.estimate.config_model import ModelConfig
from zbv_solver.layouts.cluster import Cluster
from zbv_solver.layouts.layout import ORDERS, Fixed, Layout, Order
from zbv_solver.problem.limits import MAX_PP_DEGREE

ZERO_STAGES = (0, 1, 2, 3)


def enumerate_layouts(
    model: ModelConfig, cluster: Cluster, global_batch: int, fixed: Fixed
) -> Iterator[Layout]:
    """Every layout whose degrees divide the cluster, the model and the global batch.

    Two layouts that cost the same are one: without replicas there is nothing for ZeRO to share, and the
    order of groups matters only with several replicas and several pipeline ranks.
    """
    for tensor, context, data, pipeline in _degrees(model, cluster, global_batch, fixed):
        of_rank = tensor * context * data
        for expert in _expert_degrees(model, of_rank, fixed):
            for size in _divisors(global_batch // data):
                if fixed.microbatch_size not in (None, size):
                    continue
                for stage in _zero_stages(data * context, fixed):
                    for order in _orders(data, pipeline, fixed):
                        yield Layout(
                            tensor,
                            context,
                            expert,
                            data,
                            pipeline,
                            size,
                            global_batch // data // size,
                            stage,
                            fixed.recompute or "per-stage",
                            order,
                        )


def _degrees(
    model: ModelConfig, cluster: Cluster, global_batch: int, fixed: Fixed
) -> Iterator[tuple[int, int, int, int]]:
    """Tensor, context, data and pipeline-parallel degrees."""
    for tensor in _divisors(cluster.devices):
        if fixed.tensor_parallel not in (None, tensor) or not _divides_heads(model, tensor):
            continue
        for context in _divisors(cluster.devices // tensor):
            if fixed.context_parallel not in (None, context) or not _divides_sequence(model, tensor, context):
                continue
            for pipeline in _divisors(cluster.devices // tensor // context):
                data = cluster.devices // tensor // context // pipeline
                if (
                    fixed.pipeline_parallel in (None, pipeline)
                    and fixed.data_parallel in (None, data)
                    and pipeline <= min(MAX_PP_DEGREE, model.layers + 2)
                    and global_batch % data == 0
                ):
                    yield tensor, context, data, pipeline


def _divides_heads(model: ModelConfig, tensor: int) -> bool:
    widths = [model.heads, model.ffn_width, model.vocabulary]
    if model.kv_lora_rank is None:
        widths.append(model.n_kv_heads)
    if model.experts is not None and model.shared_expert_ffn is not None:
        widths.append(model.shared_expert_ffn)
    return all(width % tensor == 0 for width in widths)


def _divides_sequence(model: ModelConfig, tensor: int, context: int) -> bool:
    if context == 1:
        return model.sequence % tensor == 0
    # With a causal mask, a device has two pieces of a sequence, from both of its ends.
    return model.attention == "flash" and model.sequence % (2 * context * tensor) == 0


def _expert_degrees(model: ModelConfig, of_rank: int, fixed: Fixed) -> list[int]:
    if model.experts is None:
        return [1] if fixed.expert_parallel in (None, 1) else []
    return [
        degree
        for degree in _divisors(model.experts)
        if of_rank % degree == 0 and fixed.expert_parallel in (None, degree)
    ]


def _zero_stages(replicas: int, fixed: Fixed) -> tuple[int, ...]:
    if fixed.zero_stage is not None:
        return (fixed.zero_stage,)
    return ZERO_STAGES if replicas > 1 else ZERO_STAGES[:1]


def _orders(data: int, pipeline: int, fixed: Fixed) -> tuple[Order, ...]:
    if fixed.placement is not None:
        return (fixed.placement,)
    return ORDERS if data > 1 and pipeline > 1 else ORDERS[:1]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
