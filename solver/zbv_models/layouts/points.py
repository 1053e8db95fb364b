"""All layouts of a ranking as points: step time over memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

from zbv_solver.search.search_state import Cancelled

from zbv_models.estimate.layers import LayerEstimate
from zbv_models.layouts.estimated_layout import EstimatedLayout, Setting
from zbv_models.layouts.layer_costs import recomputed
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.search import Ranking

PARTS = (
    *("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_parallel"),
    *("microbatch_size", "zero_stage", "placement"),
)
"""What tells layouts apart."""


class LayoutPoint(NamedTuple):
    """A layout: seconds of its step, or a lower bound, and bytes of its fullest rank, or a lower bound."""

    layout: Layout
    step_time: float
    peak_memory: float


def points_json(ranking: Ranking, setting: Setting, cancelled: Cancelled | None = None) -> dict[str, Any]:
    """All layouts in columns: those planned, those with bounds, and those that do not fit in memory.

    Numbers have four digits, so that some thousand layouts stay a small document. After a cancellation,
    layouts that were not estimated before are left out.
    """
    planned = [
        LayoutPoint(each.layout, each.step_time, max(each.plan.metrics.peak_memory)) for each in ranking.every
    ]
    bounded: list[LayoutPoint] = []
    too_large: list[LayoutPoint] = []
    proved = {each.number for each in ranking.too_large}
    others = chain.from_iterable(each.members() for each in (*ranking.waiting, *ranking.too_large))
    for each in others:
        is_new = isinstance(each.of, Layout)
        if not isinstance(each.of, Layout | EstimatedLayout) or (is_new and cancelled and cancelled()):
            continue
        estimated = EstimatedLayout.of(each.of, setting) if isinstance(each.of, Layout) else each.of
        point = LayoutPoint(estimated.layout, max(each.bound, estimated.mean_bound), least_memory(estimated))
        is_too_large = each.number in proved or point.peak_memory > setting.cluster.memory
        (too_large if is_too_large else bounded).append(point)
    return {"planned": _columns(planned), "bounded": _columns(bounded), "too_large": _columns(too_large)}


def least_memory(estimated: EstimatedLayout) -> float:
    """Lower bound of the fullest rank's memory in bytes: the mean of all ranks.

    When the last stage has computed F of a microbatch, all stages hold what this F keeps.
    """
    layout, groups = estimated.layout, estimated.setting.cluster.groups
    held = sum(
        min(_held(layer, layout.recompute) for layer in layers) * layers[0].copies
        for layers in estimated.layers
    )
    return held / layout.pipeline_parallel + min(groups[each].reserve for each in layout.used_groups)


def _held(layer: LayerEstimate, recompute: str) -> float:
    """Bytes of a layer's states, and what F of a microbatch keeps at least."""
    kept, again = layer.plain.after_forward, recomputed(layer, recompute)
    if again is not None and recompute != "none":
        kept = min(kept, again.after_forward)
    return layer.static.total + kept


def _columns(points: Iterable[LayoutPoint]) -> dict[str, list[Any]]:
    rows = list(points)
    parts = [asdict(each.layout) for each in rows]
    columns: dict[str, list[Any]] = {name: [part[name] for part in parts] for name in PARTS}
    columns["step_time"] = [float(f"{each.step_time:.4g}") for each in rows]
    columns["peak_memory"] = [int(float(f"{each.peak_memory:.4g}")) for each in rows]
    return columns
