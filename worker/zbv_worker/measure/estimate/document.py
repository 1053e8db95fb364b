"""Estimates as what `zbv plan` takes: a problem given by layers, or by the stages of a V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Costs, Memory, Problem, Units

from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.measure.estimate.estimate import Estimate, Walked

_CHANNELS = 4
"""On which a rank receives in a V, at most: activations and gradients of both neighbours."""


@dataclass(frozen=True)
class Scale:
    """How long operations and transfers take.

    Attributes
    ----------
    teraflops
        Operations per second that a device really achieves, in 10^12; None where nobody knows: times are then
        numbers of operations.
    latency
        Of a transfer, in us.
    bandwidth
        Of a transfer, in 10^9 bytes per second; None where transfers take no longer than the latency.
    """

    teraflops: float | None = None
    latency: float = 0.0
    bandwidth: float | None = None

    @property
    def unit(self) -> str:
        """Of times."""
        return "GFLOP" if self.teraflops is None else "us"

    def time(self, operations: int) -> float:
        """Of so many operations."""
        return operations / 1e9 if self.teraflops is None else operations / (self.teraflops * 1e6)

    def transfers(self) -> dict[str, Any]:
        """The costs of transfers in a problem's document."""
        if self.bandwidth is None:
            return {"p2p": self.latency}
        return {"link": {"latency": self.latency, "bandwidth": self.bandwidth * 1e3}}

    def transfer(self, size: int) -> float:
        """Of so many bytes."""
        return self.latency + (0.0 if self.bandwidth is None else size / (self.bandwidth * 1e3))


def layered_document(
    layers: Sequence[dict[str, Any]],
    pp_degree: int,
    microbatches: int,
    *,
    is_tied: bool,
    transfers: dict[str, Any],
    time_unit: str,
) -> dict[str, Any]:
    """A problem by layers, whose cut is left to the planner; memory in bytes.

    Parameters
    ----------
    layers
        As documents, in model order; equal ones are written once.
    is_tied
        Whether the ends of the model share parameters, so that one rank must have both: a V.
    transfers
        Their costs, as in a problem's ``costs``.
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


def estimated_document(
    layers: Sequence[Estimate], pp_degree: int, microbatches: int, scale: Scale, *, is_tied: bool = False
) -> dict[str, Any]:
    """The problem of estimated layers."""
    return layered_document(
        [layer_json(layer, scale) for layer in layers],
        pp_degree,
        microbatches,
        is_tied=is_tied,
        transfers=scale.transfers(),
        time_unit=scale.unit,
    )


def layer_json(layer: Estimate, scale: Scale) -> dict[str, Any]:
    """A layer of such a document."""
    found = {
        "name": layer.name,
        **_walked_json(layer.kept, layer.static.total, scale),
        "parameters_bytes": layer.static.parameters,
        "output_bytes": layer.output_bytes,
    }
    again = layer.recomputed
    if again is not None and again.memory.after_forward < layer.kept.memory.after_forward:
        found["recompute"] = _walked_json(again, layer.static.total, scale)
    return found


def stage_problem(stages: Sequence[Estimate], microbatches: int, scale: Scale) -> Problem:
    """The problem of a V of a model that cuts itself."""
    placement = Placement.of("v", len(stages) // 2)
    held = tuple(float(stage.kept.memory.after_forward) for stage in stages)
    between = tuple(float(stage.kept.memory.after_input) for stage in stages)
    flops = [stage.kept.flops for stage in stages]
    return Problem(
        placement,
        microbatches,
        Costs(
            tuple(scale.time(f.forward) for f in flops),
            tuple(scale.time(f.backward_input) for f in flops),
            tuple(scale.time(f.backward_weight) for f in flops),
            tuple(
                0.0 if placement.is_local(at) else scale.transfer(stage.output_bytes)
                for at, stage in enumerate(stages[:-1])
            ),
        ),
        Memory(
            held,
            tuple(after - before for after, before in zip(between, held, strict=True)),
            tuple(-after for after in between),
            tuple(_static(rank, placement, stages) for rank in range(placement.pp_degree)),
        ),
        units=Units(scale.unit, "bytes"),
    )


def _static(rank: int, placement: Placement, stages: Sequence[Estimate]) -> float:
    """A rank's parameters, gradients and optimizer state, largest workspace, and receives posted ahead."""
    own = [stages[stage] for stage in placement.stages_of[rank]]
    largest: dict[tuple[int, str], int] = {}
    for stage in placement.stages_of[rank]:
        for other, kind, size in (
            (stage - 1, "activation", stages[stage].input_bytes),
            (stage + 1, "gradient", stages[stage].output_bytes),
        ):
            if 0 <= other < len(stages) and placement.rank_of[other] != rank:
                key = placement.rank_of[other], kind
                largest[key] = max(largest.get(key, 0), size)
    held = sum(stage.static.total for stage in own) + max(stage.kept.memory.workspace for stage in own)
    return float(held + DEFAULT_LOOK_AHEAD * sum(largest.values()))


def _walked_json(walked: Walked, static: int, scale: Scale) -> dict[str, Any]:
    memory, flops = walked.memory, walked.flops
    return {
        "forward": scale.time(flops.forward),
        "backward_input": scale.time(flops.backward_input),
        "backward_weight": scale.time(flops.backward_weight),
        "memory": {
            "forward": memory.after_forward,
            "backward_input": memory.after_input - memory.after_forward,
            "backward_weight": -memory.after_input,
            "static": static,
            "workspace": memory.workspace,
        },
    }


def _repeated(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same layers with runs of equal ones, ``block.0`` and so on, written once."""
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
