"""A ranking of layouts as a document (docs/formats.md, Layouts)."""

from __future__ import annotations

from typing import Any

from zbv_solver.layouts.executor_answer import executor_json
from zbv_solver.layouts.request import Request
from zbv_solver.layouts.search import PlannedLayout, Ranking
from zbv_solver.plans.plan import plan_json

FLOPS_PER_TFLOP = 1e12


def ranking_json(ranking: Ranking, request: Request, *, with_plans: bool = True) -> dict[str, Any]:
    """The answer; ``with_plans`` adds the plan of every listed layout's pipeline."""
    return {
        "layouts": [_layout(each, request, with_plans) for each in ranking.best],
        "considered": ranking.considered,
        "pruned": ranking.pruned,
        "proof": {"no_layout_below": ranking.no_layout_below},
    }


def utilisation(planned: PlannedLayout, request: Request) -> float:
    """Share of the devices' peak that the model's operations use, without recomputation."""
    cluster = request.cluster
    flops = planned.estimated.setting.model.model_flops() * request.global_batch
    return flops / (planned.step_time * cluster.devices * cluster.peak_tflops * FLOPS_PER_TFLOP)


def recomputation(planned: PlannedLayout) -> str:
    """What the plan recomputes: ``none``, ``full`` or ``per-stage``."""
    model = planned.plan.problem.model
    chosen = set() if model is None else set(model.cut.recompute)
    if planned.layout.recompute != "per-stage":
        return planned.layout.recompute
    return "per-stage" if len(chosen) > 1 else "full" if True in chosen else "none"


def _layout(planned: PlannedLayout, request: Request, with_plan: bool) -> dict[str, Any]:
    layout, plan = planned.layout, planned.plan
    model = plan.problem.model
    document: dict[str, Any] = {
        "tensor_parallel": layout.tensor_parallel,
        "context_parallel": layout.context_parallel,
        "expert_parallel": layout.expert_parallel,
        "data_parallel": layout.data_parallel,
        "pipeline_parallel": layout.pipeline_parallel,
        "microbatch_size": layout.microbatch_size,
        "microbatches": layout.microbatches,
        "zero_stage": layout.zero_stage,
        "recompute": recomputation(planned),
        "placement": layout.placement,
        **executor_json(planned),
        "step_time": planned.step_time,
        "lower_bound": planned.lower_bound,
        "model_flops_utilisation": utilisation(planned, request),
        "peak_memory": max(plan.metrics.peak_memory),
        "partition": [] if model is None else [list(stage) for stage in model.partition],
    }
    if with_plan:
        document["plan"] = plan_json(plan)
    return document
