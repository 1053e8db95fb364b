"""How the best layout and its step change with the cluster and the batch.

Planning every layout again would take as long as the first search for each change. So only the layouts that
were best before are compared: those with the shortest steps or the least bounds, and the first of those that
lack little memory. They are estimated and bounded again, and few of them are planned, least bound first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.problem.problem import objective_value
from zbv_solver.search.assemble import fits
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.timing.start_times import evaluate

from zbv_models.estimate.device import GroupLink
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import (
    EstimatedLayout,
    PlannedLayout,
    layers_on_ranks,
    least_memory,
    plan_layout,
)
from zbv_models.layouts.layout import PARTS, Layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.setting import SECONDS, Setting

AMONG = 64
"""Layouts that are compared, of those that may fit."""
TOO_LARGE = 32
"""Layouts that are compared, of those that may fit if there is a little more memory."""
MORE_MEMORY = 1.1
MOST_PLANS = 4
"""Pipelines of these that are planned for each change, in addition to that of the best layout."""


@dataclass(frozen=True)
class Outcome:
    """What a change does: a number of the request is multiplied by ``factor``."""

    of: str
    factor: float
    step_time: float | None
    """Seconds of the best layout before; None if it does not fit any more, or does not divide the batch."""
    best: Layout | None
    """The best layout now, among those compared; None if none of them fits."""
    best_step_time: float | None
    is_proved: bool
    """Whether no other layout among those compared can be better."""
    among: int
    """Number of layouts that were compared."""


def changes(request: Request) -> Iterator[tuple[str, float, Request]]:
    """Faster and slower devices and links, more and less memory, larger and smaller batches."""
    cluster, batch = request.cluster, request.global_batch
    of_nodes: dict[str, tuple[tuple[float, float], Callable[[Cluster, float], Cluster]]] = {
        "device_flops": ((0.8, 1.2), _with_flops),
        "in_node_bandwidth": ((0.5, 2.0), lambda of, by: replace(of, in_node=_faster(of.in_node, by))),
        "between_nodes_bandwidth": (
            (0.5, 2.0),
            lambda of, by: replace(of, between_nodes=_faster(of.between_nodes, by)),
        ),
        "host_bandwidth": ((0.5, 2.0), _with_host_bandwidth),
        "memory": ((0.9, MORE_MEMORY), lambda of, by: replace(of, size=of.size * by, memory=of.memory * by)),
    }
    if sum(group.nodes for group in cluster.groups) == 1:
        del of_nodes["between_nodes_bandwidth"]
    if request.setting.copies == "none":
        del of_nodes["host_bandwidth"]
    for name, (factors, change) in of_nodes.items():
        for factor in factors:
            if isinstance(cluster, Cluster):
                yield name, factor, replace(request, cluster=change(cluster, factor))
                continue
            groups = tuple(change(group, factor) for group in cluster.groups)
            link = _faster(cluster.between_groups, factor if name == "between_nodes_bandwidth" else 1.0)
            changed = replace(cluster, groups=groups, between_groups=link)
            yield name, factor, replace(request, cluster=changed)
    if batch % 2 == 0:
        yield "global_batch", 0.5, replace(request, global_batch=batch // 2)
    yield "global_batch", 2.0, replace(request, global_batch=batch * 2)


def _with_flops(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    rates = {key: getattr(device, key) for key in ("achieved_tflops", "fp8_tflops", "fp4_tflops")}
    faster = {key: rate and rate * factor for key, rate in rates.items()}
    return replace(cluster, device=device.model_copy(update=faster))


def _with_host_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    bandwidth = device.host_bandwidth and device.host_bandwidth * factor
    return replace(cluster, device=device.model_copy(update={"host_bandwidth": bandwidth}))


def _faster(link: GroupLink, factor: float) -> GroupLink:
    return replace(link, bandwidth=link.bandwidth and link.bandwidth * factor)


def outcomes(ranking: Ranking, request: Request, cancelled: Cancelled | None = None) -> Iterator[Outcome]:
    """The outcome of every change, one by one, until the search is cancelled."""
    candidates = nearest(ranking, request.setting, cancelled)
    for name, factor, changed in changes(request):
        if cancelled is not None and cancelled():
            return
        outcome = _outcome(ranking.best[0], candidates, changed, cancelled)
        if cancelled is not None and cancelled():
            return  # its search may have ended early
        yield Outcome(name, factor, *outcome, len(candidates))


def nearest(ranking: Ranking, setting: Setting, cancelled: Cancelled | None = None) -> list[Layout]:
    """The layouts with the shortest steps or least bounds, and some that need a little more memory."""
    fitting = [(each.step_time, -1, each.layout) for each in ranking.every]
    for node in heapq.nsmallest(AMONG, ranking.waiting):
        fitting += [(node.bound, number, layout) for number, layout in node.members()]
    layouts = [layout for _, _, layout in sorted(fitting, key=lambda each: each[:2])[:AMONG]]
    large = 0
    for _, layout in chain.from_iterable(node.members() for node in sorted(ranking.too_large)):
        if large == TOO_LARGE or (cancelled is not None and cancelled()):
            break
        if least_memory(EstimatedLayout.of(layout, setting)) <= setting.cluster.memory * MORE_MEMORY:
            layouts.append(layout)
            large += 1
    return layouts


def _outcome(
    before: PlannedLayout, candidates: list[Layout], request: Request, cancelled: Cancelled | None
) -> tuple[float | None, Layout | None, float | None, bool]:
    """The step of the layout before; the best layout now, its step, and whether it is proved."""
    same = _with_batch(before.layout, request.global_batch)
    steps = (_planned_step(same, request, cancelled), _step_of_known_order(before, request))
    step = min((each for each in steps if each is not None), default=None)
    fitting = [each for of in candidates if (each := _with_batch(of, request.global_batch)) is not None]
    try:
        now = best_layouts(fitting, request.setting, cancelled=cancelled, most_plans=MOST_PLANS)
    except NoLayoutFits:
        return step, None if step is None else same, step, True
    known = [] if step is None or same is None else [(step, same)]
    known += [(each.step_time, each.layout) for each in now.best]
    if not known:  # cancelled
        return step, None, None, False
    best, layout = min(known, key=itemgetter(0))
    is_proved = all(node.bound >= best for node in now.waiting)
    return step, layout, best, is_proved


def _planned_step(layout: Layout | None, request: Request, cancelled: Cancelled | None) -> float | None:
    if layout is None:
        return None
    estimated = EstimatedLayout.of(layout, request.setting)
    try:
        return plan_layout(estimated, None, cancelled).step_time if estimated.has_room_for_states else None
    except InfeasibleMemory:
        return None


def _step_of_known_order(planned: PlannedLayout, request: Request) -> float | None:
    """The step with the cut and the order of a plan, at other costs; None if these do not fit any more.

    Without it, a faster link could make a step longer: plans of constructed orders are not the best ones.
    """
    plan, model = planned.plan, planned.plan.problem.model
    if model is None or _with_batch(planned.layout, request.global_batch) != planned.layout:
        return None
    estimated = EstimatedLayout.of(planned.layout, request.setting)
    problem = estimated.problem.cut_into(plan.problem.placement, model.cut)
    timing = evaluate(problem, plan.orders)
    if not fits(problem, timing.peak_memory):
        return None
    step: float = objective_value(problem.objective, timing) * SECONDS
    return step + estimated.once(layers_on_ranks(problem))


def _with_batch(layout: Layout, global_batch: int) -> Layout | None:
    """The layout with the microbatches of a batch; None if it does not divide the batch."""
    microbatches, left = divmod(global_batch, layout.data_parallel * layout.microbatch_size)
    return None if left else replace(layout, microbatches=microbatches)


def sensitivity_json(ranking: Ranking, outcomes: list[Outcome]) -> dict[str, Any]:
    """The outcomes as a document (docs/formats.md, Layouts)."""
    base = ranking.best[0]
    return {
        "step_time": base.step_time,
        "among": max((each.among for each in outcomes), default=0),
        "most_plans": MOST_PLANS,
        "changes": [_outcome_json(each, base.layout) for each in outcomes],
    }


def _outcome_json(outcome: Outcome, before: Layout) -> dict[str, Any]:
    best = None
    if outcome.best is not None:
        best = {
            **{name: getattr(outcome.best, name) for name in PARTS},
            "step_time": outcome.best_step_time,
            "is_same": replace(outcome.best, microbatches=before.microbatches) == before,
            "is_proved": outcome.is_proved,
        }
    return {"of": outcome.of, "factor": outcome.factor, "step_time": outcome.step_time, "best": best}
