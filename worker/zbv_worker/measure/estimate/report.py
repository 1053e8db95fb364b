"""An estimate's numbers, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from zbv_worker.measure.estimate.estimate import Estimate


def estimate_json(layers: Sequence[Estimate], stages: Sequence[Estimate]) -> dict[str, Any]:
    """Memory and floating-point operations of one microbatch, in bytes."""
    return {
        "layers": [_json(estimate) for estimate in layers],
        "stages": [_json(estimate) for estimate in stages],
    }


def _json(estimate: Estimate) -> dict[str, Any]:
    return {**asdict(estimate), "static_total": estimate.static.total}


def held_table(title: str, estimates: Sequence[Estimate], *, recomputed: bool = False) -> Table:
    """Memory held per microbatch and all the time; with ``recomputed``, of recomputed layers."""
    shown = _table(f"{title}: MB")
    for column in ("after F", "after I", "after W", "workspace", "static"):
        shown.add_column(column, justify="right", no_wrap=True)
    for names, estimate in _runs(estimates):
        walked = estimate.recomputed if recomputed else None
        memory = (walked or estimate.kept).memory
        held = (memory.after_forward, memory.after_input, memory.after_weight, memory.workspace)
        shown.add_row(names, *map(_mega, (*held, estimate.static.total)))
    return shown


def flops_table(title: str, estimates: Sequence[Estimate]) -> Table:
    """Parameters, output size and operations."""
    shown = _table(title)
    for column in ("parameters", "output MB", "F GFLOP", "I", "W"):
        shown.add_column(column, justify="right", no_wrap=True)
    for names, estimate in _runs(estimates):
        flops = estimate.kept.flops
        counts = (flops.forward, flops.backward_input, flops.backward_weight)
        shown.add_row(
            names,
            f"{estimate.parameters:,}",
            _mega(estimate.output_bytes),
            *(f"{count / 1e9:,.2f}" for count in counts),
        )
    return shown


def _table(title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("", no_wrap=True)
    return shown


def _runs(estimates: Sequence[Estimate]) -> list[tuple[str, Estimate]]:
    """Estimates in runs that differ only in their names, with the name of each run."""
    runs: list[list[Estimate]] = []
    for estimate in estimates:
        if runs and _unnamed(runs[-1][0]) == _unnamed(estimate):
            runs[-1].append(estimate)
        else:
            runs.append([estimate])
    return [(_names(run), run[0]) for run in runs]


def _unnamed(estimate: Estimate) -> dict[str, Any]:
    return {**vars(estimate), "name": None}


def _names(run: Sequence[Estimate]) -> str:
    return run[0].name if len(run) == 1 else f"{run[0].name} … {run[-1].name}"


def _mega(count: int) -> str:
    return f"{count / 1e6:,.2f}"
