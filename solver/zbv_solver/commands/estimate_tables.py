"""An estimate as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TextIO

from rich.console import Console
from rich.table import Table

from zbv_solver.estimate.config import EstimateConfig
from zbv_solver.estimate.layers import LayerEstimate
from zbv_solver.estimate.parameters import model_parameters

WIDTH = 120


def write_tables(config: EstimateConfig, layers: Sequence[LayerEstimate], out: TextIO) -> None:
    """What layers cost and hold, equal ones in one row; for one device and microbatch."""
    console = Console(file=out, width=WIDTH)
    rows = _distinct(layers)
    console.print(_costs(rows))
    console.print(_memory(rows))
    console.print(_summary(config, rows), highlight=False)


def _distinct(layers: Sequence[LayerEstimate]) -> list[tuple[LayerEstimate, int]]:
    """Every layer that differs from those before it by more than its name, and how many there are."""
    count: dict[LayerEstimate, int] = {}
    name: dict[LayerEstimate, str] = {}
    for layer in layers:
        unnamed = replace(layer, name="")
        name.setdefault(unnamed, layer.name)
        count[unnamed] = count.get(unnamed, 0) + (layer.repeat or 1)
    return [(replace(layer, name=name[layer]), number) for layer, number in count.items()]


def _costs(rows: Sequence[tuple[LayerEstimate, int]]) -> Table:
    table = Table(title="operations and times of a microbatch on one device")
    columns = ("layer", "copies", "GFLOP F", "I", "W", "µs F", "I", "W", "I recomputed", "output MB")
    _add_columns(table, columns)
    for layer, count in rows:
        flops, times = layer.flops, layer.plain.times
        table.add_row(
            layer.name,
            str(count),
            *(f"{value / 1e9:,.1f}" for value in astuple(flops)),
            *(f"{value:,.0f}" for value in astuple(times)),
            "–" if layer.recomputed is None else f"{layer.recomputed.times.backward_input:,.0f}",
            _mb(layer.output_bytes),
        )
    return table


def _memory(rows: Sequence[tuple[LayerEstimate, int]]) -> Table:
    table = Table(title="memory of a layer on one device, in MB: of a microbatch, and all the time")
    _add_columns(
        table,
        (
            "layer",
            "after F",
            "I",
            "W",
            "within",
            "F recomp.",
            "M params",
            "params",
            "gradients",
            "optimizer",
            "sum",
        ),
    )
    for layer, _ in rows:
        running, static = layer.plain, layer.static
        table.add_row(
            layer.name,
            _mb(running.after_forward),
            _mb(running.after_input),
            "0",
            _mb(running.workspace),
            "–" if layer.recomputed is None else _mb(layer.recomputed.after_forward),
            _mb(layer.parameters),
            *map(_mb, (static.parameters, static.gradients, static.optimizer, static.total)),
        )
    return table


def _summary(config: EstimateConfig, rows: Sequence[tuple[LayerEstimate, int]]) -> str:
    flops = sum(layer.flops.total * count for layer, count in rows) * config.parallel.tensor_parallel
    static = sum(layer.static.total * count for layer, count in rows)
    return (
        f"{model_parameters(config.model) / 1e9:.3g} B parameters; {flops / 1e12:,.4g} TFLOP per microbatch "
        f"of {config.model.tokens:,} tokens; {static / 1e9:,.4g} GB of static memory over "
        f"{config.parallel.pp_degree} ranks"
    )


def _add_columns(table: Table, names: Sequence[str]) -> None:
    for name in names:
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"
