"""``/layouts/{search_id}``: a search for layouts, its ranking, a picture of all layouts, and its request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from zbv_models.layouts.cluster import parse_cluster
from zbv_solver.export import quantities

from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.documents.problems import unpack
from zbv_service.pages.charts import Scale, percent
from zbv_service.pages.shell import page
from zbv_service.pages.words import seconds
from zbv_service.records.searches import FINISHED, LayoutSearchDocument
from zbv_service.security.access import READ, needs

PARTS = {
    "forward": ("forward", "forward"),
    "backward_input": ("backward, input gradients", "input"),
    "backward_weight": ("backward, weight gradients", "weight"),
    "recomputation": ("recomputation", "again"),
    "tensor_parallel": ("tensor-parallel exchanges", "exchange"),
    "context_parallel": ("context-parallel exchanges", "exchange"),
    "expert_parallel": ("expert-parallel exchanges", "exchange"),
    "data_parallel": ("data-parallel exchanges in every microbatch", "exchange"),
    "transfers": ("transfers between ranks", "transfer"),
    "idle": ("waiting for other ranks to compute", "idle"),
    "gradient_reduction": ("reducing gradients", "once"),
    "parameter_gathering": ("gathering parameters", "once"),
    "optimizer": ("optimizer", "once"),
    "table_reduction": ("reducing the shared embedding", "once"),
}
"""The parts of a step: their texts, and the names of their colours."""
CHANGES = {
    "device_flops": "device FLOP/s",
    "in_node_bandwidth": "bandwidth within nodes",
    "between_nodes_bandwidth": "bandwidth between nodes",
    "host_bandwidth": "bandwidth to the host",
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
"""Smaller parts of a step are not listed."""

WIDTH, HEIGHT = 1000, 500
"""The grid of small dots; dots in the same place are drawn once."""
SLOWEST = 10.0
"""The longest step in the picture, as a multiple of the best."""
LARGEST = 1.5
"""The most memory in the picture, as a multiple of a device's."""
LOWEST = 0.93
"""The shortest step in the picture, as a multiple of the best or of the bound."""
GIGA = 1e9
MOST_MARKS = 200

router = APIRouter(include_in_schema=False)


@router.get("/layouts/{search_id}", dependencies=[READ])
async def get_layout_search(request: Request, search_id: str) -> HTMLResponse:
    """The page of a search for layouts."""
    searches = state_of(request).searches
    record, packed = await searches.asked(search_id, LayoutSearchDocument)
    both = (packed, await searches.answer(record))
    values = await state_of(request).computations.run(partial(_values, root_of(request)), both)
    is_open = record.state not in FINISHED
    return await page(request, "layout_search.html.j2", row=record, is_open=is_open, **values)


@router.get("/layouts/{search_id}/layouts.json", dependencies=[READ])
async def get_layouts_json(request: Request, search_id: str) -> Response:
    """The search as JSON, with its answer."""
    searches = state_of(request).searches
    text = await searches.text(await searches.get(search_id))
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


@router.post("/layouts/{search_id}/cancel", dependencies=[needs("search")])
async def post_cancel(request: Request, search_id: str) -> Response:
    """Stop a search; the layouts planned so far are kept."""
    await state_of(request).searches.cancel(search_id)
    return RedirectResponse(f"{root_of(request)}/layouts/{quote(search_id)}", 303)


def _values(root: str, packed: tuple[bytes, bytes | None]) -> dict[str, Any]:
    """What the template shows of a request and its answer, which is empty before the search ends."""
    request = unpack(packed[0])
    answer = {} if packed[1] is None else unpack(packed[1])
    layouts, sensitivity = answer.get("layouts", []), answer.get("sensitivity") or {}
    cluster, best = parse_cluster(request["cluster"]), layouts[0] if layouts else {}
    return {
        "layouts": layouts,
        "best": best,
        "origin": answer.get("origin"),
        "degrees": [name for name in SHORT if name.endswith("_parallel")],
        "picture": layout_picture(answer, cluster.memory, root) if layouts and "points" in answer else None,
        "parts": _parts(best) if "composition" in best else [],
        "sensitivity": sensitivity,
        "changes": [_change(entry, best) for entry in sensitivity.get("changes", ())],
        "device_size": cluster.size,
        "fixed": {name: value for name, value in request["fixed"].items() if value is not None},
    }


def _parts(layout: Mapping[str, Any]) -> list[tuple[str, str, float, float, tuple[float, float]]]:
    """Text, colour, seconds and share of each part of the step, and its left end and width in percent."""
    parts, at = [], 0.0
    for name, (text, style) in PARTS.items():
        spent = layout["composition"].get(name, 0.0)
        share = spent / layout["step_time"]
        if share >= LEAST_SHARE:
            parts.append((text, style, spent, share, (percent(at), percent(share))))
            at += share
    return parts


def _change(entry: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What a change does to the best layout, and which one is best then."""
    best, text, is_other = entry["best"], "none fits", False
    if best is not None:
        is_other = not (best["is_same"] or best["step_time"] == entry["step_time"])
        text = _difference(best, before) if is_other else "the same"
        if not best["is_proved"]:
            text += " *"
    name = CHANGES.get(entry["of"], entry["of"])
    return {"name": f"{name} × {entry['factor']:g}", "text": text, "is_other": is_other, **entry}


def _difference(layout: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    parts = [f"{short} {layout[name]}" for name, short in SHORT.items() if layout[name] != before[name]]
    if layout["placement"] != before["placement"]:
        parts.append(layout["placement"])
    return ", ".join(parts) or "other recomputation"


def layout_picture(answer: Mapping[str, Any], memory: float, root: str) -> dict[str, Any]:
    """Step time over memory of all layouts; ``memory`` is what a device has room for."""
    layouts, points = answer["layouts"], answer["points"]
    best, below = layouts[0]["step_time"], answer["proof"]["no_layout_below"]
    x = Scale(0.0, memory * LARGEST / GIGA)
    y = Scale(best * SLOWEST, min(best, below) * LOWEST, is_logarithmic=True)
    slower, too_large = _places(points.get("bounded")), _places(points.get("too_large"))
    # The listed layouts are the fastest of the planned ones.
    planned = sorted(_places(points.get("planned")))[len(layouts) :]

    def mark(step: float, held: float, name: str, url: str | None = None, is_best: bool = False) -> Any:
        text = f"{name}: {seconds(step)}, {quantities.gigabytes(held)}"
        return {"x": x(held / GIGA), "y": y(step), "text": text, "url": url, "is_best": is_best}

    def is_inside(step: float, held: float) -> bool:
        return y.shows(step) and x.shows(held / GIGA)

    def path(dots: Iterable[tuple[float, float]]) -> str:
        """Dots as an SVG path on a grid."""
        places = {
            (round(x(held / GIGA) * WIDTH / 100), round(y(step) * HEIGHT / 100))
            for step, held in dots
            if is_inside(step, held)
        }
        return "".join(f"M{across} {down}h.01" for across, down in sorted(places))

    marks = [mark(step, held, "planned") for step, held in planned[:MOST_MARKS] if is_inside(step, held)]
    marks += [
        mark(
            layout["step_time"],
            layout["peak_memory"],
            _name(layout),
            f"{root}/plans/{layout['plan_id']}",
            layout is layouts[0],
        )
        for layout in reversed(layouts)
        if is_inside(layout["step_time"], layout["peak_memory"])
    ]
    dots = [*slower, *too_large]
    count = len(planned) + len(layouts) + len(dots)
    return {
        "summary": f"Step time over memory of {quantities.figure(count, 12)} layouts. "
        f"The best takes {seconds(best)}.",
        "x_ticks": x.ticks(8),
        "y_ticks": y.ticks(8),
        "memory": x(memory / GIGA),
        "bound": y(below) if below > y.last else None,
        "slower": path(slower),
        "too_large": path(too_large),
        "marks": marks,
        "counts": (len(slower), len(too_large)),
        "outside": sum(not is_inside(*dot) for dot in dots),
    }


def _places(columns: Mapping[str, Any] | None) -> list[tuple[float, float]]:
    if not columns:
        return []
    return list(zip(columns["step_time"], columns["peak_memory"], strict=True))


def _name(layout: Mapping[str, Any]) -> str:
    return (
        f"tensor {layout['tensor_parallel']}, context {layout['context_parallel']}, "
        f"expert {layout['expert_parallel']}, data {layout['data_parallel']}, "
        f"pipeline {layout['pipeline_parallel']}, microbatches of {layout['microbatch_size']}, "
        f"ZeRO {layout['zero_stage']}"
    )
