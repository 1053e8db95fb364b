"""Everything that a profile measured: for people, and as JSON. A problem holds the medians only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from typing import Any

from rich.console import Console
from rich.table import Table

from zbv_worker.profiling.profile import LinkProfile, RankProfile, Spread, StageProfile


def report_json(ranks: Sequence[RankProfile]) -> dict[str, Any]:
    """By rank: times in seconds, medians and 90th percentiles; memory in bytes."""
    return {"ranks": [{**asdict(rank), "static_total": rank.static.total} for rank in ranks]}


def print_report(ranks: Sequence[RankProfile], out: Console) -> None:
    """Tables of stages, ranks and links."""
    stages = sorted((stage for rank in ranks for stage in rank.stages), key=lambda stage: stage.stage)
    for shown in (_times(stages), _held(stages), _static(ranks)):
        out.print(shown)
    links = [link for rank in ranks for link in rank.links]
    if links:
        out.print(_links(links))


def _times(stages: Sequence[StageProfile]) -> Table:
    shown = Table(title="Stages: ms, median and 90th percentile", title_justify="left")
    for column in ("stage", "F", "I", "W", "B"):
        shown.add_column(column, justify="right", no_wrap=True)
    for stage in stages:
        times = (stage.forward, stage.backward_input, stage.backward_weight, stage.backward)
        shown.add_row(str(stage.stage), *map(_ms, times))
    return shown


def _held(stages: Sequence[StageProfile]) -> Table:
    shown = Table(title="Held of a microbatch, and beside that within an action: MB", title_justify="left")
    for column in ("stage", "after F", "after I", "after W", "within"):
        shown.add_column(column, justify="right", no_wrap=True)
    for stage in stages:
        held = (stage.held_after_forward, stage.held_after_input, stage.held_after_weight, stage.workspace)
        shown.add_row(str(stage.stage), *map(_mb, held))
    return shown


def _static(ranks: Sequence[RankProfile]) -> Table:
    shown = Table(title="Always held: MB", title_justify="left")
    # Headings short enough for a terminal of 80 columns.
    for column in ("rank", "param.", "grad.", "optim.", "buffers", "receives", "within", "total"):
        shown.add_column(column, justify="right", no_wrap=True)
    for rank in ranks:
        shown.add_row(str(rank.rank), *map(_mb, astuple(rank.static)), _mb(rank.static.total))
    return shown


def _links(links: Sequence[LinkProfile]) -> Table:
    shown = Table(title="Transfers one way", title_justify="left")
    for column in ("from", "to", "latency", "bandwidth", "of bytes: us, median and 90th percentile"):
        shown.add_column(column, justify="right" if "bytes" not in column else "left")
    for link in links:
        bandwidth = "—" if link.bandwidth is None else f"{link.bandwidth / 1e9:.2f} GB/s"
        shown.add_row(
            str(link.sender),
            str(link.receiver),
            f"{link.latency * 1e6:.0f} us",
            bandwidth,
            ", ".join(_samples(link)),
        )
    return shown


def _samples(link: LinkProfile) -> Iterator[str]:
    for sample in link.samples:
        yield f"{sample.bytes}: {sample.seconds.median * 1e6:.0f} {sample.seconds.p90 * 1e6:.0f}"


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.3g} {spread.p90 * 1e3:.3g}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"
