"""A ranking of layouts as a document (docs/formats.md, Layouts), and what a step consists of."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from zbv_solver.documents.files import plain
from zbv_solver.export.timeline import pair_savings
from zbv_solver.plans.orders import durations
from zbv_solver.plans.plan import plan_json
from zbv_solver.problem.layered_problem import uncut
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.timing.start_times import evaluate

from zbv_models.estimate.model_layers import model_flops, parameters_of, trained_parameters_of
from zbv_models.estimate.states import StaticBytes
from zbv_models.estimate.times import StepTimes, TimeShares
from zbv_models.layouts.compared_layout import ComparedLayout
from zbv_models.layouts.estimated_layout import (
    EstimatedLayout,
    PlannedLayout,
    layers_on_ranks,
    least_memory,
)
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.executor_search import ExecutorLayout
from zbv_models.layouts.layout import PARTS, Layout
from zbv_models.layouts.measured_layers import ORIGINS, Origin, Origins
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import Ranking
from zbv_models.layouts.sensitivity import Outcome, sensitivity_json
from zbv_models.layouts.setting import SECONDS, Setting

FLOPS_PER_TFLOP = 1e12
EXCHANGES = ("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel")
HIDEABLE = {"none": (), "experts": ("expert_parallel",), "all": EXCHANGES[:3]}
"""The exchanges that pairs hide, by what is asked for."""


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
    model = request.config.model
    parameters, trained = parameters_of(model).total, trained_parameters_of(model).total
    if trained < parameters:
        document |= {"parameters": parameters, "trained_parameters": trained}
    if model.origin is not None:
        document["origin"] = model.origin.text.strip()
    if with_points:
        document["points"] = points_json(ranking, request.setting, cancelled)
    if sensitivity is not None:
        document["sensitivity"] = sensitivity_json(ranking, sensitivity)
    return document


def _layout(planned: PlannedLayout, request: Request, with_plan: bool) -> dict[str, Any]:
    layout, plan, model = planned.layout, planned.plan, planned.plan.problem.model
    document: dict[str, Any] = {
        **{name: getattr(layout, name) for name in PARTS if name != "placement"},
        "microbatches": layout.microbatches,
        "recompute": recomputation(planned),
        **_recomputed_json(layout),
        "placement": layout.placement,
        **_executor_json(planned),
        **_pairs_json(planned),
        **_copies_json(planned),
        "step_time": planned.step_time,
        "lower_bound": planned.lower_bound,
        "model_flops_utilisation": utilisation(planned, request),
        "peak_memory": max(plan.metrics.peak_memory),
        "reserved_memory": reserved_memory(planned),
        "memory": memory_of_ranks(planned),
        "composition": composition(planned),
        "costs": costs_of(planned),
        "partition": [] if model is None else [list(stage) for stage in model.partition],
    }
    if layout.groups:
        document |= {"groups": list(layout.groups), "devices": layout.devices}
    if with_plan:
        document["plan"] = plan_json(plan)
    return document


def utilisation(planned: PlannedLayout, request: Request) -> float:
    """Share of the used devices' peak that the model's operations use, without recomputation."""
    cluster = request.cluster
    flops = model_flops(planned.estimated.setting.model) * request.global_batch
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


def _recomputed_json(layout: Layout) -> dict[str, Any]:
    """What ``recompute`` does not say: how many layers of every stage, or which modules."""
    if layout.recompute_layers is not None:
        return {"recompute_layers": layout.recompute_layers}
    return {"recompute_modules": list(layout.recompute_modules)} if layout.recompute_modules else {}


def _executor_json(planned: PlannedLayout) -> dict[str, Any]:
    """The keys of a layout that depend on its executor."""
    if not isinstance(planned, ExecutorLayout):
        return {"executor": FREE}
    schedule, free = planned.best.schedule, planned.free
    return {
        "executor": planned.executor,
        "schedule": schedule.name,
        "virtual_stages": schedule.placement.chunks,
        "group_size": schedule.group,
        "settings": planned.settings,
        "remark": planned.remark,
        "free_order": free and {"step_time": free.step_time, "lower_bound": free.lower_bound},
    }


def _pairs_json(planned: PlannedLayout) -> dict[str, Any]:
    """What pairs save, and the steps that they are compared with, in seconds; empty without pairs."""
    if not isinstance(planned, ComparedLayout) or (found := pair_savings(planned.plan)) is None:
        return {}
    return {
        "pairs": {
            "paired": found.paired,
            "forwards": found.forwards,
            "saved": found.saved * SECONDS,
            "factor": planned.plan.problem.pair_factor,
            "step_time_without": planned.without_pairs and planned.without_pairs.step_time,
            "baselines": plain(planned.baselines),
        }
    }


def _copies_json(planned: PlannedLayout) -> dict[str, Any]:
    """What is copied to the host, and the step without copies in seconds; empty without copies."""
    problem = planned.plan.problem
    if not isinstance(planned, ComparedLayout) or problem.copies is None:
        return {}
    return {
        "copies": {
            "copied": planned.copied,
            "forwards": problem.n_stages * problem.microbatches,
            "on_host": planned.on_host,
            "step_time_without": planned.without_copies and planned.without_copies.step_time,
        }
    }


def costs_of(planned: PlannedLayout) -> dict[Origin, dict[str, int]]:
    """Where the costs of a plan's layers come from: by origin, the number of layers of each kind.

    Layers of recomputed stages have names such as ``block (recomputed)``.
    """
    counts: dict[Origin, dict[str, int]] = {origin: {} for origin in ORIGINS}
    if planned.plan.problem.model is None:
        return counts
    layers, repeated = planned.estimated.estimate.layers, planned.recomputed
    of_layers = planned.estimated.origins or (Origins(),) * len(layers)
    for kind, origins in zip(layers, of_layers, strict=True):
        for name in kind.names:
            is_again = name in repeated
            shown = f"{kind.name} (recomputed)" if is_again else kind.name
            origin = origins.recomputed if is_again else origins.plain
            if is_again and planned.layout.recompute == "selective":  # profiles measure full recomputation
                origin = "estimated" if origins.plain == "estimated" else "scaled"
            counts[origin][shown] = counts[origin].get(shown, 0) + 1
    return counts


def points_json(ranking: Ranking, setting: Setting, cancelled: Cancelled | None = None) -> dict[str, Any]:
    """All layouts in columns: those planned, those with bounds, and those that do not fit in memory.

    Steps and memory are lower bounds, except those of planned layouts. Numbers have four digits, so that some
    thousand layouts stay a small document. After a cancellation, layouts that were not estimated before are
    left out.
    """
    planned = [(each.layout, each.step_time, max(each.plan.metrics.peak_memory)) for each in ranking.every]
    bounded: list[tuple[Layout, float, float]] = []
    too_large: list[tuple[Layout, float, float]] = []
    proved = {node.number for node in ranking.too_large}
    for node in chain(ranking.waiting, ranking.too_large):
        for number, layout in node.members():
            if isinstance(node.of, EstimatedLayout):
                estimated = node.of
            elif cancelled is not None and cancelled():
                continue
            else:
                estimated = EstimatedLayout.of(layout, setting)
            memory = least_memory(estimated)
            is_too_large = number in proved or memory > setting.cluster.memory
            row = layout, max(node.bound, estimated.mean_bound), memory
            (too_large if is_too_large else bounded).append(row)
    return {"planned": _columns(planned), "bounded": _columns(bounded), "too_large": _columns(too_large)}


def _columns(rows: list[tuple[Layout, float, float]]) -> dict[str, list[Any]]:
    return {
        **{name: [getattr(layout, name) for layout, _, _ in rows] for name in PARTS},
        "step_time": [float(f"{step:.4g}") for _, step, _ in rows],
        "peak_memory": [int(float(f"{memory:.4g}")) for _, _, memory in rows],
    }


def memory_of_ranks(planned: PlannedLayout) -> list[dict[str, float]]:
    """Bytes on a device of every rank at its peak: what holds them, which adds up to the peak.

    ``parameters``, ``gradients`` and ``optimizer`` are there all the time; of the gradients that exist only
    while the backwards of a stage run, those that exist at once. ``buffers`` are the workspace of the action
    that needs most, what an executor holds for transfers, and ``reserve``. ``activations`` are the rest.
    """
    problem, found = planned.plan.problem, []
    cut = problem.model
    if cut is None:  # for type checkers: the plan of a layout has layers
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    devices, transfers = cut.devices or (None,) * problem.pp_degree, 0
    if isinstance(planned, ExecutorLayout):
        largest = max(layer.output_bytes for layer in planned.estimated.estimate.layers)
        transfers = STATES[planned.executor].buffers(problem.microbatches, largest)
        transfers *= problem.placement.chunks
    for rank, names in enumerate(layers_on_ranks(problem)):
        reserve = planned.estimated.setting.cluster.groups[planned.layout.group_of[rank]].reserve
        static = sum((planned.estimated.layer_on(name, rank).static for name in names), StaticBytes())
        held = cut.static[rank] - reserve - transfers
        for stage in problem.placement.stages_of[rank]:
            layers = slice(cut.cut.bounds[stage], cut.cut.bounds[stage + 1])
            held += sum(cut.model.columns(cut.cut.recompute[stage], devices[rank]).static[layers])
        whole = problem.memory.static[rank]
        found.append(
            {
                "parameters": static.parameters,
                "gradients": held - static.parameters - static.optimizer,
                "optimizer": static.optimizer,
                "activations": planned.plan.metrics.peak_memory[rank] - whole,
                "buffers": whole - held,
            }
        )
    return found


def composition(planned: PlannedLayout) -> dict[str, float]:
    """Seconds that add up to the step of a layout.

    ``forward``, ``backward_input`` and ``backward_weight`` are compute without exchanges, and
    ``recomputation`` is all that recomputed stages add. The exchanges of every microbatch are those that
    compute does not hide, in the same action or in the other one of a pair. ``transfers`` is how much
    shorter the step would be in the same order if transfers between ranks took no time; even so a rank waits
    ``idle`` for another one to compute, the bubble. The parts up to here are those of the rank that computes
    longest. The last four, once per step, are those of the rank that needs longest for them.
    """
    plan, estimated = planned.plan, planned.estimated
    model = plan.problem.model
    if model is None:  # for type checkers: the plan of a layout has layers
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    layers = replace(uncut(plan.problem), p2p=0.0, link=None, links=(), blocking=False, limit=None)
    at_once = layers.cut_into(plan.problem.placement, model.cut)
    on_ranks = [
        {name: estimated.layer_on(name, rank) for name in names}
        for rank, names in enumerate(layers_on_ranks(plan.problem))
    ]
    rank = max(range(at_once.pp_degree), key=at_once.busy_time)
    compute, again, exchanges = np.zeros(3), 0.0, TimeShares()
    for name, layer in on_ranks[rank].items():
        plain, waits = layer.plain.times, layer.exchanged
        compute += (plain.forward, plain.backward_input, plain.backward_weight)
        compute -= (waits.forward, waits.backward_input, waits.backward_weight)
        exchanges += layer.shares
        if name in planned.recomputed:
            again += (layer.recomputed(planned.layout.recompute) or layer.plain).times.total - plain.total
    scale = at_once.microbatches * SECONDS
    shares = {name: getattr(exchanges, name) * scale for name in EXCHANGES}
    forward, inputs, weights = (compute * scale).tolist()
    part = plan.orders.slice_of(rank)
    actions = (plan.orders.stage[part], plan.orders.letter[part], plan.orders.microbatch[part])
    alone = float(at_once.arrays.durations(*actions).sum()) * SECONDS
    busy = float(durations(at_once, plan.orders)[part].sum()) * SECONDS
    hideable = HIDEABLE[estimated.setting.training.pairs]
    if total := sum(map(shares.__getitem__, hideable)):
        shares |= {name: shares[name] * (1 - (alone - busy) / total) for name in hideable}
    # Fused backwards may be shorter than I and W.
    saved = forward + inputs + weights + again * scale + sum(shares.values()) - busy
    kept = 1 - saved / (inputs + weights) if inputs + weights > 0 else 1.0
    transfers = (plan.metrics.span - evaluate(at_once, plan.orders).span) * SECONDS
    steps = [[layer.step for layer in own.values()] for own in on_ranks]
    busiest = sum(max(steps, key=lambda own: sum(each.total for each in own)), StepTimes())
    return {
        "forward": forward,
        "backward_input": inputs * kept,
        "backward_weight": weights * kept,
        "recomputation": again * scale,
        **shares,
        "transfers": transfers,
        "idle": max(0.0, plan.metrics.span * SECONDS - busy - transfers),
        "gradient_reduction": (busiest.gradient_reduction + estimated.latency) * SECONDS,
        "parameter_gathering": busiest.parameter_gathering * SECONDS,
        "optimizer": busiest.optimizer * SECONDS,
        "table_reduction": estimated.estimate.table_reduction * SECONDS,
    }
