"""How the best layout and its step change with the cluster and the batch.

Planning every layout again would take as long as the first search for each change. So only the layouts that
were best before are compared: those with the shortest steps or the least bounds, and the first of those that
lack little memory. They are estimated and bounded again, and few of them are planned, least bound first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.search.search_state import Cancelled

from zbv_models.estimate.device import Device, GroupLink
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, Setting
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.points import PARTS, least_memory
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import PlannedLayout, Ranking, best_layouts, plan_layout

AMONG = 64
"""Layouts that are compared, of those that may fit."""
TOO_LARGE = 32
"""Layouts that are compared, of those that may fit if there is a little more memory."""
MORE_MEMORY = 1.1
MOST_PLANS = 4
"""Pipelines of these that are planned for each change, in addition to that of the best layout."""


@dataclass(frozen=True)
class Change:
    """A number of the request that is multiplied by ``factor``."""

    of: str
    factor: float
    apply: Callable[[Request], Request]


@dataclass(frozen=True)
class Outcome:
    """What a change does.

    Attributes
    ----------
    step_time
        Seconds of the best layout before; None if it does not fit any more, or does not divide the batch.
    best, best_step_time
        The best layout now, among those compared; None if none of them fits.
    is_proved
        Whether no other layout among those compared can be better.
    among
        Number of layouts that were compared.
    """

    change: Change
    step_time: float | None
    best: Layout | None
    best_step_time: float | None
    is_proved: bool
    among: int


def changes(request: Request) -> Iterator[Change]:
    """Faster and slower devices and links, more and less memory, larger and smaller batches."""
    for factor in (0.8, 1.2):
        yield Change("device_flops", factor, _on_cluster(factor, _device))
    yield from (Change("in_node_bandwidth", f, _on_cluster(f, _in_node)) for f in (0.5, 2.0))
    groups = request.cluster.groups
    if len(groups) > 1 or groups[0].nodes > 1:
        yield from (
            Change("between_nodes_bandwidth", f, _on_cluster(f, _between, between=f)) for f in (0.5, 2.0)
        )
    yield from (Change("memory", f, _on_cluster(f, _memory)) for f in (0.9, MORE_MEMORY))
    if request.global_batch % 2 == 0:
        yield Change("global_batch", 0.5, lambda given: replace(given, global_batch=given.global_batch // 2))
    yield Change("global_batch", 2.0, lambda given: replace(given, global_batch=given.global_batch * 2))


def outcomes(ranking: Ranking, request: Request, cancelled: Cancelled | None = None) -> Iterator[Outcome]:
    """The outcome of every change, one by one, until the search is cancelled."""
    candidates = nearest(ranking, request.setting, cancelled)
    for change in changes(request):
        if cancelled is not None and cancelled():
            return
        found = _outcome(change, ranking.best[0].layout, candidates, change.apply(request), cancelled)
        if cancelled is not None and cancelled():
            return  # its search may have ended early
        yield found


def nearest(ranking: Ranking, setting: Setting, cancelled: Cancelled | None = None) -> list[Layout]:
    """The layouts with the shortest steps or least bounds, and some that need a little more memory."""
    first = heapq.nsmallest(AMONG, ranking.waiting, key=lambda each: each[:2])
    fitting = [(each.step_time, -1, each.layout) for each in ranking.every]
    for each in chain.from_iterable(each.members() for each in first):
        if isinstance(each.of, Layout | EstimatedLayout):
            layout = each.of if isinstance(each.of, Layout) else each.of.layout
            fitting.append((each.bound, each.number, layout))
    found = [layout for _, _, layout in sorted(fitting, key=lambda each: each[:2])[:AMONG]]
    large = 0
    for each in sorted(ranking.too_large, key=lambda each: each[:2]):
        if large == TOO_LARGE or (cancelled is not None and cancelled()):
            break
        if isinstance(each.of, Layout | EstimatedLayout):
            estimated = EstimatedLayout.of(each.of, setting) if isinstance(each.of, Layout) else each.of
            if least_memory(estimated) <= setting.cluster.memory * MORE_MEMORY:
                found.append(estimated.layout)
                large += 1
    return found


def _outcome(
    change: Change, before: Layout, candidates: list[Layout], request: Request, cancelled: Cancelled | None
) -> Outcome:
    same = _planned(_with_batch(before, request.global_batch), request, cancelled)
    step = None if same is None else same.step_time
    fitting = [_with_batch(each, request.global_batch) for each in candidates]
    try:
        now = best_layouts(
            [each for each in fitting if each is not None],
            request.setting,
            cancelled=cancelled,
            most_plans=MOST_PLANS,
        )
    except NoLayoutFits:
        layout = None if same is None else same.layout
        return Outcome(change, step, layout, step, True, len(candidates))
    found = [each for each in (same, *now.best) if each is not None]
    if not found:  # cancelled
        return Outcome(change, step, None, None, False, len(candidates))
    best = min(found, key=lambda each: each.step_time)
    is_proved = all(each.bound >= best.step_time for each in now.waiting)
    return Outcome(change, step, best.layout, best.step_time, is_proved, len(candidates))


def _planned(layout: Layout | None, request: Request, cancelled: Cancelled | None) -> PlannedLayout | None:
    if layout is None:
        return None
    estimated = EstimatedLayout.of(layout, request.setting)
    if not estimated.has_room_for_states:
        return None
    try:
        return plan_layout(estimated, None, cancelled)
    except InfeasibleMemory:
        return None


def _with_batch(layout: Layout, global_batch: int) -> Layout | None:
    """The layout with the microbatches of a batch; None if it does not divide the batch."""
    of_microbatch = layout.data_parallel * layout.microbatch_size
    if global_batch % of_microbatch:
        return None
    return replace(layout, microbatches=global_batch // of_microbatch)


def _on_cluster(
    factor: float, change: Callable[[Cluster, float], Cluster], *, between: float = 1.0
) -> Callable[[Request], Request]:
    """Change all nodes, and the bandwidth between groups of nodes."""

    def apply(request: Request) -> Request:
        cluster = request.cluster
        if isinstance(cluster, Cluster):
            return replace(request, cluster=change(cluster, factor))
        groups = tuple(change(group, factor) for group in cluster.groups)
        link = _faster(cluster.between_groups, between)
        return replace(request, cluster=replace(cluster, groups=groups, between_groups=link))

    return apply


def _device(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    faster: Device = replace(
        device,
        tflops=device.tflops * factor,
        fp8_tflops=device.fp8_tflops and device.fp8_tflops * factor,
        fp4_tflops=device.fp4_tflops and device.fp4_tflops * factor,
    )
    return replace(cluster, device=faster)


def _faster(link: GroupLink, factor: float) -> GroupLink:
    return replace(link, bandwidth=link.bandwidth and link.bandwidth * factor)


def _in_node(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, in_node=_faster(cluster.in_node, factor))


def _between(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, between_nodes=_faster(cluster.between_nodes, factor))


def _memory(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, size=cluster.size * factor, memory=cluster.memory * factor)


def sensitivity_json(ranking: Ranking, found: list[Outcome]) -> dict[str, Any]:
    """The outcomes as a document (docs/formats.md, Layouts)."""
    base = ranking.best[0]
    return {
        "step_time": base.step_time,
        "among": max((each.among for each in found), default=0),
        "most_plans": MOST_PLANS,
        "changes": [_outcome_json(each, base.layout) for each in found],
    }


def _outcome_json(found: Outcome, before: Layout) -> dict[str, Any]:
    best = None
    if found.best is not None:
        parts = asdict(found.best)
        best = {
            **{name: parts[name] for name in PARTS},
            "step_time": found.best_step_time,
            "is_same": replace(found.best, microbatches=before.microbatches) == before,
            "is_proved": found.is_proved,
        }
    return {
        "of": found.change.of,
        "factor": found.change.factor,
        "step_time": found.step_time,
        "best": best,
    }
