"""All layouts of a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from zbv_solver.estimate.fit import fits
from zbv_solver.estimate.shapes import Degrees
from zbv_solver.estimate.transformer import Transformer
from zbv_solver.layouts.cluster import Cluster
from zbv_solver.layouts.layout import ORDERS, Fixed, Layout, Order, Recompute
from zbv_solver.problem.limits import MAX_PP_DEGREE

ZERO_STAGES = (0, 1, 2, 3)


def enumerate_layouts(
    model: Transformer, cluster: Cluster, global_batch: int, fixed: Fixed, is_selective: bool = False
) -> Iterator[Layout]:
    """Every layout whose degrees divide the cluster, the model and the global batch.

    Two layouts that cost the same are one: without replicas there is nothing for ZeRO to share, and the
    order of groups matters only with several replicas and several pipeline ranks. ``none`` and ``full`` are
    plans of ``per-stage``; ``is_selective`` says whether selective recomputation is another choice.
    """
    kinds: tuple[Recompute, ...] = ("per-stage", "selective") if is_selective else ("per-stage",)
    for degrees, pipeline in _degrees(model, cluster.devices, global_batch, fixed):
        for size in _divisors(global_batch // degrees.data, fixed.microbatch_size):
            for stage in _zero_stages(degrees.replicas, fixed):
                for order in _orders(degrees.data, pipeline, fixed):
                    for recompute in kinds if fixed.recompute is None else (fixed.recompute,):
                        yield Layout(
                            degrees.tensor,
                            degrees.context,
                            degrees.expert,
                            degrees.data,
                            pipeline,
                            size,
                            global_batch // degrees.data // size,
                            stage,
                            recompute,
                            order,
                        )


def _degrees(
    model: Transformer, devices: int, global_batch: int, fixed: Fixed
) -> Iterator[tuple[Degrees, int]]:
    """Degrees that fit the model, and pipeline ranks."""
    ranks = min(MAX_PP_DEGREE, model.n_layers)
    experts = model.experts
    for tensor in _divisors(devices, fixed.tensor_parallel):
        if not fits(model, Degrees(tensor, tensor > 1)):
            continue
        for context in _divisors(devices // tensor, fixed.context_parallel):
            if not fits(model, Degrees(tensor, tensor > 1, context)):
                continue
            for pipeline in _divisors(devices // tensor // context, fixed.pipeline_parallel):
                data = devices // tensor // context // pipeline
                if pipeline > ranks or fixed.data_parallel not in (None, data) or global_batch % data:
                    continue
                for expert in _divisors(experts, fixed.expert_parallel):
                    if tensor * context * data % expert == 0:
                        yield Degrees(tensor, tensor > 1, context, expert=expert, data=data), pipeline


def _zero_stages(replicas: int, fixed: Fixed) -> tuple[int, ...]:
    if fixed.zero_stage is not None:
        return (fixed.zero_stage,)
    return ZERO_STAGES if replicas > 1 else ZERO_STAGES[:1]


def _orders(data: int, pipeline: int, fixed: Fixed) -> tuple[Order, ...]:
    if fixed.placement is not None:
        return (fixed.placement,)
    return ORDERS if data > 1 and pipeline > 1 else ORDERS[:1]


def _divisors(number: int, fixed: int | None = None) -> list[int]:
    """The divisors in ascending order, or the fixed one if it divides."""
    candidates = range(1, number + 1) if fixed is None else (fixed,)
    return [divisor for divisor in candidates if number % divisor == 0]
