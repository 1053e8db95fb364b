"""Turns measurements and estimates into parts of a planning problem, or into a problem by layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zbv_solver.problem.stages import Memory

from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.measure.stage_memory import StageMemory, StaticBytes

_CHANNELS = 2
"""The most channels that a rank receives on: one from each neighbour."""


def layered_document(
    layers: Sequence[dict[str, Any]],
    pp_degree: int,
    microbatches: int,
    *,
    is_tied: bool,
    transfers: dict[str, Any],
    time_unit: str,
) -> dict[str, Any]:
    """A problem by layers, which the planner divides into stages; memory in bytes.

    Parameters
    ----------
    layers
        Layer documents in model order; runs of equal ones are written once.
    is_tied
        Whether the first and the last layer share parameters, so that one rank must host both: a V.
    transfers
        The costs of transfers, as in a problem's ``costs``.
    """
    largest = max(layer["output_bytes"] for layer in layers)
    receives = DEFAULT_LOOK_AHEAD * _CHANNELS * largest if pp_degree > 1 else 0
    return {
        "pp_degree": pp_degree,
        "microbatches": microbatches,
        "placement": "v" if is_tied else "auto",
        "objective": "span",
        "layers": _repeated(layers),
        "costs": transfers,
        "memory": {"static": receives, "limit": None},
        "units": {"time": time_unit, "memory": "bytes"},
    }


def layer_json(
    name: str,
    static: StaticBytes,
    output_bytes: int,
    kept: tuple[Mapping[str, Any], StageMemory],
    recomputed: tuple[Mapping[str, Any], StageMemory] | None,
) -> dict[str, Any]:
    """A layer's entry in a problem.

    Parameters
    ----------
    kept, recomputed
        Times by name, communication too, and memory, with kept and with recomputed activations. Recomputation
        is left out if it saves no memory.
    """
    found = {
        "name": name,
        **_costs_json(*kept, static.total),
        "parameters_bytes": static.parameters,
        "output_bytes": output_bytes,
    }
    if recomputed is not None and recomputed[1].after_forward < kept[1].after_forward:
        found["recompute"] = _costs_json(*recomputed, static.total)
    return found


def _costs_json(times: Mapping[str, Any], memory: StageMemory, static: int) -> dict[str, Any]:
    return {
        **times,
        "memory": {
            "forward": memory.after_forward,
            "backward_input": memory.after_input - memory.after_forward,
            "backward_weight": -memory.after_input,
            "static": static,
            "workspace": memory.workspace,
        },
    }


def plan_memory(
    stages: Sequence[StageMemory], static: Sequence[float], limit: tuple[float, ...] | None = None
) -> Memory:
    """A problem's memory: what each stage's actions add, and each rank's static memory and limit."""
    held = [float(stage.after_forward) for stage in stages]
    between = [float(stage.after_input) for stage in stages]
    return Memory(
        forward=tuple(held),
        backward_input=tuple(after - before for after, before in zip(between, held, strict=True)),
        backward_weight=tuple(-after for after in between),
        static=tuple(static),
        limit=limit,
    )


def _repeated(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers, with runs of equal ones (``block.0`` and so on) written once."""
    found: list[dict[str, Any]] = []
    at = 0
    while at < len(layers):
        prefix, _, number = layers[at]["name"].rpartition(".")
        count = 0
        while prefix and number == "0" and at + count < len(layers):
            named = {**layers[at + count], "name": layers[at]["name"]}
            if layers[at + count]["name"] != f"{prefix}.{count}" or named != layers[at]:
                break
            count += 1
        found.append({**layers[at], "name": prefix, "repeat": count} if count > 1 else layers[at])
        at += max(1, count)
    return found
