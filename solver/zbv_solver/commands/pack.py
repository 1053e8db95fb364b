"""``zbv pack``: microbatches, their distribution over replicas, and plans for a global batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from zbv_solver.commands.interrupt import interruptible, terminated_like_interrupted
from zbv_solver.commands.searching import search_options, spinner
from zbv_solver.documents.files import output
from zbv_solver.packing.batch import Batch, load_batch
from zbv_solver.packing.packing import Packing, packing_json
from zbv_solver.packing.packing import pack as packed
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search


def pack(arguments: argparse.Namespace) -> None:
    """Pack a batch and write the packing, or print a summary of it to a terminal."""
    batch = load_batch(arguments.batch)
    options = search_options(arguments)
    is_summary = arguments.output is None and sys.stdout.isatty()
    path = arguments.output or "-"
    with output(path) as write_text, terminated_like_interrupted():
        found = _watched(batch, options, arguments.compare)
        if not is_summary:
            write_text(json.dumps(packing_json(found)) + "\n")
    if is_summary:
        console = Console()
        console.print(_replicas(found))
        console.print(_baselines(found))
        sys.stdout.write(f"{_verdict(found)}\nThe packing is not saved. To save it, add: -o packed.json\n")
    elif path != "-":
        sys.stderr.write(f"{path}: {_verdict(found)}\n")


def _watched(batch: Batch, options: SearchOptions, compare: bool) -> Packing:
    """Pack on a separate thread, with a progress display; Ctrl-C ends the searches and raises."""
    with spinner("packing") as say:

        def work(stop: Callable[[], bool]) -> Packing:
            def planner(problem: Problem, own: SearchOptions) -> Plan:
                return search(problem, own, cancelled=stop)

            return packed(batch, options, compare=compare, say=say, planner=planner)

        return interruptible(work)


def _verdict(found: Packing) -> str:
    """What the packing achieves, in one line."""
    microbatches, replicas = sum(len(each.microbatches) for each in found.replicas), len(found.replicas)
    return (
        f"{found.batch.problem.objective} {found.step_time:.6g} (at most {found.gap:.2%} above any packing), "
        f"{microbatches} {'microbatch' if microbatches == 1 else 'microbatches'} on {replicas} "
        f"{'replica' if replicas == 1 else 'replicas'}, {found.seconds:.2f} s"
    )


def _replicas(found: Packing) -> Table:
    lengths = found.batch.sequences
    table = Table(title=f"lower bound of every packing: {found.lower_bound:.6g}")
    columns = ("replica", "microbatches", "sequences", "tokens", "largest", found.batch.problem.objective)
    for column in columns:
        table.add_column(column, justify="right")
    for place, each in enumerate(found.replicas):
        tokens = [sum(lengths[index] for index in contents) for contents in each.microbatches]
        table.add_row(
            str(place),
            str(len(tokens)),
            str(sum(map(len, each.microbatches))),
            str(sum(tokens)),
            str(max(tokens)),
            f"{each.plan.objective:.6g}",
        )
    return table


def _baselines(found: Packing) -> Table:
    table = Table(title="the usual way to pack this batch, compared with this one")
    for column in ("", "microbatches", "estimate", "longer by", found.batch.problem.objective, "longer by"):
        table.add_column(column, justify="right" if column else "left")
    for each in found.baselines:
        planned = each.step_time
        table.add_row(
            each.name,
            str(each.microbatches),
            f"{each.estimate:.6g}",
            _longer(each.estimate, found.estimate),
            "–" if planned is None else f"{planned:.6g}",
            "–" if planned is None else _longer(planned, found.step_time),
        )
    return table


def _longer(value: float, than: float) -> str:
    return f"{value / than - 1:.2%}" if than > 0 else "–"
