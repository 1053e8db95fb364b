"""An estimate as a problem for `zbv plan`, by layers or by the stages of a V, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import groupby
from typing import Any

from rich.table import Table
from zbv_solver.numerals import fixed
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.stages import Costs, Placement

from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.measure.estimate.estimate import Estimate, Walked
from zbv_worker.measure.problems import layer_json, layered_document, plan_memory
from zbv_worker.measure.stage_memory import StageMemory, received_bytes
from zbv_worker.measure.tables import table_of_numbers


@dataclass(frozen=True)
class Scale:
    """Converts operations and bytes to times."""

    teraflops: float | None = None
    """Operations per second that a device achieves, in 10^12; None if unknown: times are then numbers of
    operations."""
    latency: float = 0.0
    """Latency of a transfer, in us."""
    bandwidth: float | None = None
    """Bandwidth of a transfer, in 10^9 bytes per second; None if transfers take only the latency."""

    @property
    def unit(self) -> str:
        """The unit of times."""
        return "GFLOP" if self.teraflops is None else "us"

    def time(self, operations: int) -> float:
        """The time of a number of operations."""
        return operations / 1e9 if self.teraflops is None else operations / (self.teraflops * 1e6)

    def transfers(self) -> dict[str, Any]:
        """The costs of transfers in a problem's document."""
        if self.bandwidth is None:
            return {"p2p": self.latency}
        return {"link": {"latency": self.latency, "bandwidth": self.bandwidth * 1e3}}

    def transfer(self, size: int) -> float:
        """The time to transfer a number of bytes."""
        return self.latency + (0.0 if self.bandwidth is None else size / (self.bandwidth * 1e3))


def estimated_document(
    layers: Sequence[Estimate], pp_degree: int, microbatches: int, scale: Scale, *, is_tied: bool = False
) -> dict[str, Any]:
    """The problem of estimated layers."""
    return layered_document(
        [
            layer_json(
                layer.name,
                layer.static,
                layer.output_bytes,
                _costs(layer.kept, scale),
                None if layer.recomputed is None else _costs(layer.recomputed, scale),
            )
            for layer in layers
        ],
        pp_degree,
        microbatches,
        is_tied=is_tied,
        transfers=scale.transfers(),
        time_unit=scale.unit,
    )


def _costs(walked: Walked, scale: Scale) -> tuple[dict[str, float], StageMemory]:
    return {name: scale.time(count) for name, count in asdict(walked.flops).items()}, walked.memory


def stage_problem(stages: Sequence[Estimate], microbatches: int, scale: Scale) -> Problem:
    """The problem of a V, for a model that cuts itself into stages."""
    placement = Placement.of("v", len(stages) // 2)
    times, memory = zip(*(_costs(stage.kept, scale) for stage in stages), strict=True)
    p2p = tuple(
        0.0 if placement.is_local(at) else scale.transfer(stage.output_bytes)
        for at, stage in enumerate(stages[:-1])
    )
    return Problem(
        placement,
        microbatches,
        Costs(**{name: tuple(each[name] for each in times) for name in times[0]}, p2p=p2p),
        plan_memory(memory, [_static(rank, placement, stages) for rank in range(placement.pp_degree)]),
        units=Units(scale.unit, "bytes"),
    )


def _static(rank: int, placement: Placement, stages: Sequence[Estimate]) -> float:
    """A rank's parameters, gradients and optimizer state, largest workspace, and receives posted ahead."""
    own = {stage: stages[stage] for stage in placement.stages_of[rank]}
    sizes = {stage: (each.input_bytes, each.output_bytes) for stage, each in own.items()}
    held = sum(each.static.total for each in own.values())
    workspace = max(each.kept.memory.workspace for each in own.values())
    return float(held + workspace + DEFAULT_LOOK_AHEAD * received_bytes(placement, rank, sizes))


def estimate_json(layers: Sequence[Estimate], stages: Sequence[Estimate]) -> dict[str, Any]:
    """Memory and floating-point operations of one microbatch, in bytes."""
    return {
        kind: [{**asdict(each), "static_total": each.static.total} for each in estimates]
        for kind, estimates in (("layers", layers), ("stages", stages))
    }


def held_table(title: str, estimates: Sequence[Estimate], *, recomputed: bool = False) -> Table:
    """Memory held per microbatch and all the time; with ``recomputed``, of recomputed layers."""
    columns = ("", "after F", "after I", "after W", "workspace", "static")
    shown = table_of_numbers(f"{title}: MB", *columns)
    for names, estimate in _runs(estimates):
        walked = estimate.recomputed if recomputed else None
        held = astuple((walked or estimate.kept).memory)
        shown.add_row(names, *map(_mega, (*held, estimate.static.total)))
    return shown


def flops_table(title: str, estimates: Sequence[Estimate]) -> Table:
    """Parameters, output size and operations."""
    shown = table_of_numbers(title, "", "parameters", "output MB", "F GFLOP", "I", "W")
    for names, estimate in _runs(estimates):
        operations = (fixed(count / 1e9, 2) for count in astuple(estimate.kept.flops))
        shown.add_row(names, fixed(estimate.parameters), _mega(estimate.output_bytes), *operations)
    return shown


def _runs(estimates: Sequence[Estimate]) -> Iterator[tuple[str, Estimate]]:
    """Estimates in runs that differ only in their names, with the name of each run."""
    for _, group in groupby(estimates, key=lambda each: replace(each, name="")):
        first, *others = group
        yield (f"{first.name} … {others[-1].name}" if others else first.name), first


def _mega(count: int) -> str:
    return fixed(count / 1e6, 2)
