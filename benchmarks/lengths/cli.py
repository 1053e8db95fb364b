"""``python -m benchmarks lengths``."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

DRAWN = 10_000
"""Sequences of a distribution that its row describes."""


def add_lengths(commands: Any) -> None:
    """Add the command that shows distributions and writes the problems made of them."""
    command = commands.add_parser(
        "lengths",
        help="show distributions of sequence lengths; write the problems and batches made of them",
        description="Show the distributions of sequence lengths, made and published, and the problems whose "
        "microbatches differ and the batches to pack that are made of them. With -o, write them as files.",
    )
    command.add_argument("--only", metavar="GLOB", default="*", help="only problems with a matching name")
    command.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write the problems and batches into this directory"
    )
    command.set_defaults(run=_lengths)


def _lengths(parsed: argparse.Namespace) -> int:
    import json

    from rich.console import Console
    from zbv_solver.documents.files import write

    from benchmarks.findings import WrongInput
    from benchmarks.lengths.distributions import distributions
    from benchmarks.lengths.instances import PackingInstance, PlanningInstance, instances, packing_instances

    everything: list[PlanningInstance | PackingInstance] = [*instances(), *packing_instances()]
    chosen = [each for each in everything if fnmatchcase(each.name, parsed.only)]
    if not chosen:
        raise WrongInput(
            f"--only: found {parsed.only!r}, which matches none of the {len(everything)} names "
            f"({everything[0].name}, …, {everything[-1].name}). Give a name or a pattern with * and ?."
        )
    if parsed.output is None:
        Console(soft_wrap=True).print(_table())
        for law in distributions():
            source = f" (source: {law.source})" if law.source else ""
            print(f"{law.name}: {law.about}{source}")
        sys.stdout.writelines(f"{each.name}\n" for each in chosen)
        return 0
    parsed.output.mkdir(parents=True, exist_ok=True)
    for each in chosen:
        write(parsed.output / f"{each.name}.json", json.dumps(each.document()) + "\n")
    print(f"{len(chosen)} files in {parsed.output}")
    return 0


def _table() -> Table:
    """One row per distribution: mean, quantiles, and where the tokens are."""
    from rich.table import Table

    from benchmarks.lengths.distributions import distributions

    table = Table(
        title=f"{DRAWN:,} sequences of every distribution, in tokens; ≥ 8192: the share of tokens in these",
        title_justify="left",
    )
    table.add_column("distribution")
    for column in ("mean", "median", "95 %", "99 %", "longest", "≥ 8192"):
        table.add_column(column, justify="right")
    for each in distributions():
        lengths = sorted(each.lengths(DRAWN, seed="0"))
        total = sum(lengths)
        quantiles = (lengths[DRAWN * share // 100] for share in (50, 95, 99))
        long = sum(length for length in lengths if length >= 8192) / total
        table.add_row(
            each.name,
            f"{total / DRAWN:.0f}",
            *map(str, quantiles),
            str(lengths[-1]),
            f"{long:.0%}",
        )
    return table
