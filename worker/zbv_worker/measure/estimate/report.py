"""An estimate's numbers, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, replace
from itertools import groupby
from typing import Any

from rich.table import Table

from zbv_worker.measure.estimate.estimate import Estimate
from zbv_worker.measure.tables import table_of_numbers


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
        operations = (f"{count / 1e9:,.2f}" for count in astuple(estimate.kept.flops))
        shown.add_row(names, f"{estimate.parameters:,}", _mega(estimate.output_bytes), *operations)
    return shown


def _runs(estimates: Sequence[Estimate]) -> Iterator[tuple[str, Estimate]]:
    """Estimates in runs that differ only in their names, with the name of each run."""
    for _, group in groupby(estimates, key=lambda each: replace(each, name="")):
        first, *others = group
        yield (f"{first.name} … {others[-1].name}" if others else first.name), first


def _mega(count: int) -> str:
    return f"{count / 1e6:,.2f}"
