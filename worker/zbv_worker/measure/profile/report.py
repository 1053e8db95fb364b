"""A profile's measurements, as tables and as JSON. A problem contains only the medians."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from typing import Any

from rich.console import Console
from rich.table import Table
from zbv_solver.export.quantities import SECONDS, time

from zbv_worker.measure.profile.layers import layers_of
from zbv_worker.measure.profile.profile import LinkProfile, RankProfile, Spread, StageProfile, stages_of
from zbv_worker.measure.tables import table_of_numbers


def profile_json(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """Measurements by rank: times in seconds, medians and 90th percentiles; memory in bytes."""
    return {"ranks": [{**asdict(rank), "static_total": rank.static.total} for rank in ranks]}


def print_report(ranks: Sequence[RankProfile], out: Console) -> None:
    """Print tables of stages or layers, ranks and links."""
    for title, named in _measured(ranks):
        out.print(_times(title, named), _held(title, named))
        for name, found in named:
            if found.split is not None and found.split.is_small:
                out.print(f"{title}, {name}: {found.split}.", highlight=False, markup=False)
        fused = [
            f"{name} ({found.weight_share:.0%})" for name, found in named if not found.is_worth_splitting
        ]
        if fused:
            said = f"{title} that the problem does not split (share of W in the backward): "
            out.print(said + ", ".join(fused) + ".", highlight=False, markup=False)
        if any(found.pairs for _, found in named):
            out.print(_pairs(title, named))
    if any(stage.copies for stage in stages_of(ranks)):
        out.print(_copies(stages_of(ranks)))
    out.print(_static(ranks))
    links = [link for rank in ranks for link in rank.links]
    if links:
        out.print(_links(links))


def _measured(ranks: Sequence[RankProfile]) -> Iterator[tuple[str, list[tuple[str, StageProfile]]]]:
    """Measurements by name, for each table title."""
    layers = layers_of(ranks)
    for title, named in (
        ("Stages", [(str(stage.stage), stage) for stage in stages_of(ranks)]),
        ("Layers", [(layer.name, layer.kept) for layer in layers]),
        ("Layers, recomputed", [(layer.name, layer.recomputed) for layer in layers if layer.recomputed]),
    ):
        if named:
            yield title, named


def _times(title: str, named: Sequence[tuple[str, StageProfile]]) -> Table:
    shown = table_of_numbers(f"{title}: ms, median and 90th percentile", "", "F", "I", "W", "B")
    for name, found in named:
        times = (found.forward, found.backward_input, found.backward_weight, found.backward)
        shown.add_row(name, *map(_ms, times))
    return shown


def _held(title: str, named: Sequence[tuple[str, StageProfile]]) -> Table:
    columns = ("", "after F", "after I", "after W", "workspace")
    shown = table_of_numbers(f"{title}: MB held, and workspace", *columns)
    for name, found in named:
        shown.add_row(name, *map(_mb, astuple(found.memory)))
    return shown


def _pairs(title: str, named: Sequence[tuple[str, StageProfile]]) -> Table:
    shown = table_of_numbers(
        f"{title}: ms that a pair saves, median and 90th percentile", "", "F + I", "F + B"
    )
    for name, found in named:
        if found.pairs is not None:
            shown.add_row(name, _ms(found.pairs.with_input), _ms(found.pairs.with_backward))
    return shown


def _copies(stages: Sequence[StageProfile]) -> Table:
    shown = table_of_numbers("Copies to the host: ms, median and 90th percentile", "", "out", "back", "MB")
    for stage in stages:
        if stage.copies is not None:
            times = map(_ms, (stage.copies.offload, stage.copies.reload))
            shown.add_row(str(stage.stage), *times, _mb(stage.copies.moved))
    return shown


def _static(ranks: Sequence[RankProfile]) -> Table:
    columns = ("rank", "param.", "grad.", "optim.", "buffers", "receives", "worksp.", "comm.", "total")
    shown = table_of_numbers("Static memory: MB", *columns)
    for rank in ranks:
        shown.add_row(str(rank.rank), *map(_mb, astuple(rank.static)), _mb(rank.static.total))
    return shown


def _links(links: Sequence[LinkProfile]) -> Table:
    shown = table_of_numbers("One-way transfers", "from", "to", "latency", "bandwidth")
    shown.add_column("bytes: µs, median and 90th percentile")
    for link in links:
        samples = (
            f"{each.bytes}: {each.seconds.median * 1e6:.0f} {each.seconds.p90 * 1e6:.0f}"
            for each in link.samples
        )
        shown.add_row(
            str(link.sender),
            str(link.receiver),
            time(link.latency, SECONDS),
            "—" if link.bandwidth is None else f"{link.bandwidth / 1e9:.2f} GB/s",
            ", ".join(samples),
        )
    return shown


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.3g} {spread.p90 * 1e3:.3g}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"
