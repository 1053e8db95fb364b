"""A ranking of layouts as a document (docs/formats.md, Layouts)."""

from __future__ import annotations

from typing import Any

from zbv_solver.plans.plan import plan_json
from zbv_solver.search.search_state import Cancelled

from zbv_models.layouts.composition import composition
from zbv_models.layouts.executor_answer import executor_json
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.measured_layers import ORIGINS, Origin, Origins
from zbv_models.layouts.points import points_json
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import PlannedLayout, Ranking
from zbv_models.layouts.sensitivity import Outcome, sensitivity_json

FLOPS_PER_TFLOP = 1e12


def ranking_json(
    ranking: Ranking,
    request: Request,
    *,
    with_plans: bool = True,
    with_points: bool = False,
    sensitivity: list[Outcome] | None = None,
    cancelled: Cancelled | None = None,
) -> dict[str, Any]:
    """The answer.

    Parameters
    ----------
    with_plans
        Adds the plan of every listed layout's pipeline.
    with_points
        Adds step and memory of all layouts, as far as they are known.
    sensitivity
        Outcomes of changes, which are added.
    cancelled
        Ends the estimates of points.
    """
    document: dict[str, Any] = {
        "layouts": [_layout(each, request, with_plans) for each in ranking.best],
        "considered": ranking.considered,
        "planned": ranking.planned,
        "pruned": ranking.pruned,
        "unsettled": ranking.unsettled,
        "proof": {"no_layout_below": ranking.no_layout_below},
    }
    if with_points:
        document["points"] = points_json(ranking, request.setting, cancelled)
    if sensitivity is not None:
        document["sensitivity"] = sensitivity_json(ranking, sensitivity)
    return document


def utilisation(planned: PlannedLayout, request: Request) -> float:
    """Share of the used devices' peak that the model's operations use, without recomputation."""
    cluster = request.cluster
    flops = planned.estimated.setting.model.model_flops() * request.global_batch
    of_rank = planned.layout.devices // planned.layout.pipeline_parallel
    peak = of_rank * sum(cluster.groups[group].peak_tflops for group in planned.layout.group_of)
    return flops / (planned.step_time * peak * FLOPS_PER_TFLOP)


def reserved_memory(planned: PlannedLayout) -> float:
    """Bytes that PyTorch's allocator reserves on the fullest device, and what training does not use."""
    groups = planned.estimated.setting.cluster.groups
    peaks = zip(planned.layout.group_of, planned.plan.metrics.peak_memory, strict=True)
    return max(groups[group].reserved(peak) for group, peak in peaks)


def recomputation(planned: PlannedLayout) -> str:
    """What the plan recomputes: ``none``, ``selective``, ``full`` or ``per-stage``."""
    model = planned.plan.problem.model
    chosen = set() if model is None else set(model.cut.recompute)
    if planned.layout.recompute != "per-stage":
        return planned.layout.recompute
    return "per-stage" if len(chosen) > 1 else "full" if True in chosen else "none"


def costs_of(planned: PlannedLayout) -> dict[Origin, dict[str, int]]:
    """Where the costs of a plan's layers come from: by origin, the number of layers of each kind.

    Layers of recomputed stages have names such as ``block (recomputed)``.
    """
    cut_model = planned.plan.problem.model
    found: dict[Origin, dict[str, int]] = {origin: {} for origin in ORIGINS}
    if cut_model is None:
        return found
    layers, asked = planned.estimated.estimate.layers, planned.layout.recompute
    repeated = planned.recomputed
    of_layers = planned.estimated.origins or (Origins(),) * len(layers)
    for kind, origins in zip(layers, of_layers, strict=True):
        for name in kind.names:
            again = name in repeated
            shown = f"{kind.name} (recomputed)" if again else kind.name
            origin = origins.recomputed if again else origins.plain
            if again and asked == "selective":  # profiles measure full recomputation
                origin = "estimated" if origins.plain == "estimated" else "scaled"
            counts = found[origin]
            counts[shown] = counts.get(shown, 0) + 1
    return found


def _recomputed_json(layout: Layout) -> dict[str, Any]:
    """What ``recompute`` does not say: how many layers of every stage, or which modules."""
    if layout.recompute_layers is not None:
        return {"recompute_layers": layout.recompute_layers}
    return {"recompute_modules": list(layout.recompute_modules)} if layout.recompute_modules else {}


def recomputation_text(planned: PlannedLayout) -> str:
    """What the plan recomputes, in words."""
    layout, kind = planned.layout, recomputation(planned)
    if layout.recompute_layers is not None:
        return f"{kind}, first {layout.recompute_layers} of a stage"
    modules = ", ".join(layout.recompute_modules)
    return f"{kind}: {modules}" if modules else kind


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
        **_recomputed_json(layout),
        "placement": layout.placement,
        **executor_json(planned),
        "step_time": planned.step_time,
        "lower_bound": planned.lower_bound,
        "model_flops_utilisation": utilisation(planned, request),
        "peak_memory": max(plan.metrics.peak_memory),
        "reserved_memory": reserved_memory(planned),
        "composition": composition(planned).parts(),
        "costs": costs_of(planned),
        "partition": [] if model is None else [list(stage) for stage in model.partition],
    }
    if layout.groups:
        document |= {"groups": list(layout.groups), "devices": layout.devices}
    if with_plan:
        document["plan"] = plan_json(plan)
    return document
