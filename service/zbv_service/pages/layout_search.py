"""The page of a search for layouts: verdict, ranking, parts of the best step, and sensitivity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zbv_models.layouts.cluster import parse_cluster
from zbv_solver.export import quantities

from zbv_service.pages.charts import Box, percent
from zbv_service.pages.layout_picture import LayoutPicture, layout_picture
from zbv_service.searches.layout_documents import LayoutSearchDocument

GROUPS = {
    "forward": "forward",
    "backward_input": "input",
    "backward_weight": "weight",
    "recomputation": "again",
    "tensor_parallel": "exchange",
    "context_parallel": "exchange",
    "expert_parallel": "exchange",
    "data_parallel": "exchange",
    "transfers": "transfer",
    "idle": "idle",
}
"""The colour of a part; the others are work once per step."""
TEXTS = {
    "forward": "forward",
    "backward_input": "backward, input gradients",
    "backward_weight": "backward, weight gradients",
    "recomputation": "recomputation",
    "tensor_parallel": "tensor-parallel exchanges",
    "context_parallel": "context-parallel exchanges",
    "expert_parallel": "expert-parallel exchanges",
    "data_parallel": "data-parallel exchanges in every microbatch",
    "transfers": "transfers between ranks",
    "idle": "waiting for other ranks to compute",
    "gradient_reduction": "reducing gradients",
    "parameter_gathering": "gathering parameters",
    "optimizer": "optimizer",
    "table_reduction": "reducing the shared embedding",
}
CHANGES = {
    "device_flops": "device FLOP/s",
    "in_node_bandwidth": "bandwidth within nodes",
    "between_nodes_bandwidth": "bandwidth between nodes",
    "memory": "device memory",
    "global_batch": "global batch",
}
SHORT = {
    "tensor_parallel": "TP",
    "context_parallel": "CP",
    "expert_parallel": "EP",
    "data_parallel": "DP",
    "pipeline_parallel": "PP",
    "microbatch_size": "microbatch",
    "zero_stage": "ZeRO",
}
LEAST_SHARE = 5e-5


@dataclass(frozen=True)
class LayoutRow:
    """A layout of the ranking, as texts."""

    degrees: tuple[str, ...]
    microbatches: str
    zero_stage: str
    recompute: str
    placement: str
    step: str
    bound: str
    utilisation: str
    tensors: str
    reserved: str
    plan_id: str
    executor: str
    schedule: str


@dataclass(frozen=True)
class Part:
    """A part of the step; ``style`` names its colour."""

    name: str
    style: str
    seconds: str
    share: str
    box: Box


@dataclass(frozen=True)
class ChangeRow:
    """What a change does, as texts; ``relative`` compares the step with the one before."""

    change: str
    step: str
    relative: str
    best: str
    best_step: str
    is_other: bool


@dataclass(frozen=True)
class LayoutSearchView:
    """The content of the page."""

    title: str
    subtitle: str
    best: str
    bound: str
    gap: str
    considered: str
    ruled_out: str
    planned: str
    share: str
    is_proved: bool
    rows: tuple[LayoutRow, ...] = ()
    settings: str = ""
    free_step: str = ""
    picture: LayoutPicture | None = None
    parts: tuple[Part, ...] = ()
    changes: tuple[ChangeRow, ...] = ()
    among: int = 0
    most_plans: int = 0
    facts: tuple[tuple[str, str], ...] = ()


def layout_view(
    search: LayoutSearchDocument, answer: Mapping[str, Any], request: Mapping[str, Any], root: str
) -> LayoutSearchView:
    """The content of the page of a search; its answer is empty before its end."""
    counts, summary = search.progress, search.summary
    layouts = answer.get("layouts", [])
    cluster = parse_cluster(request["cluster"])
    sensitivity = answer.get("sensitivity") or {}
    gap, objective = search.gap, search.objective
    return LayoutSearchView(
        title=f"{summary.model or 'A model'} on {summary.devices:,} {summary.device or 'devices'}",
        subtitle=f"{summary.layouts:,} layouts, global batch {summary.global_batch:,}, "
        f"sequences of {summary.sequence_length:,} tokens",
        best=_seconds(objective),
        bound=_seconds(search.lower_bound),
        gap="–" if gap is None else quantities.percent(gap),
        considered="–" if counts is None else f"{counts.considered:,}",
        ruled_out="–" if counts is None else f"{counts.ruled_out:,}",
        planned="–" if counts is None else f"{counts.planned:,}",
        share="" if counts is None else f"{counts.ruled_out / counts.considered:.1%}",
        is_proved=search.state == "done",
        rows=tuple(_row(each) for each in layouts),
        settings=layouts[0].get("settings") or layouts[0].get("remark") or "" if layouts else "",
        free_step=_free_step(layouts[0]) if layouts else "",
        picture=layout_picture(answer, cluster.memory, root) if layouts and "points" in answer else None,
        parts=_parts(layouts[0]) if layouts and "composition" in layouts[0] else (),
        changes=tuple(_change(each, sensitivity["step_time"], layouts[0]) for each in _changes(sensitivity)),
        among=sensitivity.get("among", 0),
        most_plans=sensitivity.get("most_plans", 0),
        facts=_facts(search, request, cluster.size),
    )


def _row(layout: Mapping[str, Any]) -> LayoutRow:
    return LayoutRow(
        degrees=tuple(str(layout[name]) for name in SHORT if name.endswith("_parallel")),
        microbatches=f"{layout['microbatches']} × {layout['microbatch_size']}",
        zero_stage=str(layout["zero_stage"]),
        recompute=layout["recompute"],
        placement=_groups(layout),
        step=_seconds(layout["step_time"]),
        bound=_seconds(layout["lower_bound"]),
        utilisation=f"{layout['model_flops_utilisation']:.1%}",
        tensors=f"{layout['peak_memory'] / 1e9:.3g} GB",
        reserved=f"{layout['reserved_memory'] / 1e9:.3g} GB",
        plan_id=layout["plan_id"],
        executor=layout["executor"],
        schedule=_schedule(layout),
    )


def _schedule(layout: Mapping[str, Any]) -> str:
    if "schedule" not in layout:
        return "any order"
    group = layout["group_size"]
    return f"{layout['schedule']}{f', groups of {group}' if group else ''}"


def _groups(layout: Mapping[str, Any]) -> str:
    """How devices are numbered, and the groups of nodes of the pipeline ranks, if there are several."""
    of_ranks = ", ".join(map(str, layout.get("groups", ())))
    return f"{layout['placement']}{f'; ranks on nodes of group {of_ranks}' if of_ranks else ''}"


def _free_step(layout: Mapping[str, Any]) -> str:
    """The step of the same layout in a free order; empty if it is that or if none fits."""
    free = layout.get("free_order")
    return "" if free is None else _seconds(free["step_time"])


def _parts(layout: Mapping[str, Any]) -> tuple[Part, ...]:
    found, at, step = [], 0.0, layout["step_time"]
    for name, text in TEXTS.items():
        seconds = layout["composition"].get(name, 0.0)
        share = seconds / step
        if share >= LEAST_SHARE:
            box = Box(percent(at), 0.0, percent(share), 100.0)
            style = GROUPS.get(name, "once")
            found.append(Part(text, style, _seconds(seconds), f"{share:.1%}", box))
            at += share
    return tuple(found)


def _changes(sensitivity: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = sensitivity.get("changes", [])
    return found


def _change(found: Mapping[str, Any], before: float, layout: Mapping[str, Any]) -> ChangeRow:
    step, best = found["step_time"], found["best"]
    text = "none fits"
    if best is not None:
        is_same = best["is_same"] or best["step_time"] == step
        text = "the same" if is_same else _difference(best, layout)
        if not best["is_proved"]:
            text += " *"
    return ChangeRow(
        change=f"{CHANGES.get(found['of'], found['of'])} × {found['factor']:g}",
        step="does not fit" if step is None else _seconds(step),
        relative="" if step is None else f"× {step / before:.3f}",
        best=text,
        best_step="–" if best is None else _seconds(best["step_time"]),
        is_other=best is not None and not (best["is_same"] or best["step_time"] == step),
    )


def _difference(layout: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    parts = [f"{short} {layout[name]}" for name, short in SHORT.items() if layout[name] != before[name]]
    if layout["placement"] != before["placement"]:
        parts.append(layout["placement"])
    return ", ".join(parts) or "other recomputation"


def _facts(
    search: LayoutSearchDocument, request: Mapping[str, Any], size: float
) -> tuple[tuple[str, str], ...]:
    fixed = [
        f"{name.replace('_', ' ')} {value}" for name, value in request["fixed"].items() if value is not None
    ]
    facts = [
        ("Devices", f"{search.summary.devices:,}, {size / 1e9:.3g} GB each"),
        ("Fixed parts", ", ".join(fixed) or "none"),
        ("Effort", search.options.effort or "constructed orders"),
    ]
    return tuple(facts)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{quantities.figure(value)} s"
